"""Runs a program for ARM, linked statically, in an emulator: `python arm_machine.py PROGRAM`. Ends as the program does.

It has what a program of one thread asks of Linux that computes and prints: memory, writing, and its end."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import unicorn
from elftools.elf.elffile import ELFFile
from unicorn import arm64_const as arm

PAGE = 4096
HEAP, STACK, MAPPINGS, SPACE = 1 << 32, 1 << 33, 1 << 34, 1 << 31  # where they are, and how much each may grow
DOT = 1 << 20  # HWCAP_ASIMDDP: what AT_HWCAP (16) says that the processor has
WRITE, WRITEV, EXIT, EXIT_GROUP, BRK, MMAP = 64, 66, 93, 94, 214, 222
IGNORED = {96, 99, 135, 215, 226}  # set_tid_address, set_robust_list, rt_sigprocmask, munmap, mprotect
NO_CALL = -38 & (1 << 64) - 1


def run(program: Path) -> int:
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    machine.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
    with program.open("rb") as file:
        elf = ELFFile(file)
        start, headers = elf["e_entry"], _loaded(machine, elf)
        sizes = [(3, headers), (4, elf["e_phentsize"]), (5, elf["e_phnum"])]
    for begin in (HEAP, MAPPINGS, STACK - SPACE):
        machine.mem_map(begin, SPACE)
    top = STACK - PAGE
    machine.mem_write(top + 1024, b"program\0" + bytes(range(16)))
    # the auxiliary vector; 25: random bytes
    known = [*sizes, (6, PAGE), (9, start), (16, DOT), (25, top + 1032), (0, 0)]
    entries = b"".join(struct.pack("<2Q", *each) for each in known)
    machine.mem_write(top, struct.pack("<4Q", 1, top + 1024, 0, 0) + entries)  # one argument, no environment
    machine.reg_write(arm.UC_ARM64_REG_SP, top)
    machine.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vectors are allowed
    calls = Calls()
    machine.hook_add(unicorn.UC_HOOK_INTR, calls)
    machine.emu_start(start, 0)
    assert calls.status is not None
    return calls.status


def _loaded(machine: Any, elf: Any) -> int:
    """Puts the program into memory; where its headers are."""
    end, headers = 0, 0
    for part in elf.iter_segments():
        if part["p_type"] == "PT_PHDR":
            headers = part["p_vaddr"]
        if part["p_type"] != "PT_LOAD":
            continue
        begin, behind = part["p_vaddr"] // PAGE * PAGE, -(-(part["p_vaddr"] + part["p_memsz"]) // PAGE) * PAGE
        begin = max(begin, end)
        if behind > begin:
            machine.mem_map(begin, behind - begin)
        machine.mem_write(part["p_vaddr"], part.data())
        end = max(end, behind)
    return headers


class Calls:
    """Answers the program's calls of the system. status: with which it ended."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._heap, self._mapped = HEAP, MAPPINGS

    def __call__(self, machine: Any, number: int, _: Any) -> None:
        asked = machine.reg_read(arm.UC_ARM64_REG_X8)
        given = [machine.reg_read(arm.UC_ARM64_REG_X0 + at) for at in range(3)]
        result = 0
        if asked == WRITE:
            result = self._write(machine, given[1], given[2])
        elif asked == WRITEV:
            parts = struct.unpack(f"<{2 * given[2]}Q", machine.mem_read(given[1], 16 * given[2]))
            result = sum(self._write(machine, *part) for part in zip(parts[::2], parts[1::2], strict=True))
        elif asked in (EXIT, EXIT_GROUP):
            self.status = given[0]
            machine.emu_stop()
        elif asked == BRK:
            self._heap = result = given[0] or self._heap
        elif asked == MMAP:
            result, self._mapped = self._mapped, self._mapped - (-given[1] // PAGE * PAGE)
        elif asked not in IGNORED:
            result = NO_CALL
        machine.reg_write(arm.UC_ARM64_REG_X0, result)

    def _write(self, machine: Any, begin: int, count: int) -> int:
        sys.stdout.write(bytes(machine.mem_read(begin, count)).decode())
        return count


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
