"""A program that does with native I/O threads (`io_check.c`, built under a sanitizer, in its first argument's folder)
all that a link does, in a random order, and compares what they bring with the file. It needs no torch, which would take
the sanitizers a minute."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import threading
from typing import Any

import xxhash

sys.path.insert(0, sys.argv[1])
import io_check  # type: ignore[import-not-found]

PAGE = 4096
CACHED, DROPPED, DIRECT, MAPPED = range(4)  # io.c: How
URGENT, SPECULATIVE, BACKGROUND = range(3)
SYSTEM, ENDS_EARLY, DAMAGED = 1, 2, 3
CONTENT = random.Random(1).randbytes(120 * PAGE + 1000)
ROOM = 64 * PAGE  # of a slot
SLOTS = 12

draw = random.Random(2)
memory = mmap.mmap(-1, SLOTS * ROOM)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


def request(pieces: list[tuple[int, int, int, int]], file: int, right: bool = True) -> bytes:
    """Of pieces (offset, bytes, place in the slot, how), with their checksum, or a wrong one."""
    parts = b"".join(CONTENT[offset : offset + nbytes] for offset, nbytes, *_ in pieces)
    digest = xxhash.xxh3_64_intdigest(parts) ^ (not right)
    packed = [struct.pack("=qqqiiii", *piece[:3], file, piece[3], -1, 0) for piece in pieces]
    return struct.pack("=Qii", digest, len(parts) > 240, len(pieces)) + b"".join(packed)


def some_pieces(direct: bool) -> list[tuple[int, int, int, int]]:
    """Pieces of all sizes, some of which lie in the slot's pages as in the file's."""
    pieces, at = [], 0
    for _ in range(draw.randrange(1, 4)):
        nbytes = draw.choice([draw.randrange(1, 2000), draw.randrange(2 * PAGE, 18 * PAGE)])
        offset = draw.randrange(len(CONTENT) - nbytes)
        if draw.random() < 0.5:
            at = -(-at // PAGE) * PAGE + offset % PAGE
        pieces.append((offset, nbytes, at, DIRECT if direct else draw.choice([CACHED, DROPPED])))
        at += nbytes
    return pieces


def check(slot: int, pieces: list[tuple[int, int, int, int]]) -> None:
    for offset, nbytes, at, _ in pieces:
        begin = slot * ROOM + at
        assert memory[begin : begin + nbytes] == CONTENT[offset : offset + nbytes]


def use(threads: Any, files: list[tuple[int, bool]], steps: int) -> None:
    """Submits, waits, polls, takes back and drops, until every load has ended once."""
    free, requests = list(range(SLOTS)), list[bytes]()
    under_way: dict[int, tuple[int, list[tuple[int, int, int, int]], bool]] = {}

    def ended(result: Any) -> None:
        number, *outcome = result if isinstance(result, tuple) else (result,)
        slot, pieces, right = under_way.pop(number)
        assert outcome[:1] == ([] if right else [DAMAGED]), outcome
        check(slot, pieces)
        free.append(slot)

    def back(number: int) -> None:
        free.append(under_way.pop(number)[0])

    for _ in range(steps):
        step = draw.random()
        if step < 0.5 and free:
            file, direct = draw.choice(files)
            pieces, slot, kind = some_pieces(direct), free.pop(), draw.randrange(3)
            right = draw.random() < 0.9 or sum(nbytes for _, nbytes, *_ in pieces) <= 240
            under_way[len(requests)] = slot, pieces, right
            requests.append(request(pieces, file, right))
            threads.submit(len(requests) - 1, kind, address + slot * ROOM, requests[-1])
        elif step < 0.65 and under_way:
            ended(threads.wait())
        elif step < 0.85:
            if (result := threads.poll()) is not None:
                ended(result)
        elif step < 0.9:
            for each in threads.recall():
                back(each)
        elif step < 0.98:
            for each in list(under_way):
                if threads.withdraw(each):
                    back(each)
        else:
            threads.drop()
            for each in list(under_way):
                back(each)
        threads.counters()
    while under_way:
        ended(threads.wait())
    assert {sys.getrefcount(each) for each in requests} == {3}  # the list, `each`, the call: no load has kept one


def fail(threads: Any, file: int, folder: int) -> None:
    """Files that end early or cannot be read."""
    late = struct.pack("=Qii", 0, 0, 1) + struct.pack("=qqqiiii", len(CONTENT) - 100, 400, 0, file, CACHED, -1, 0)
    unreadable = struct.pack("=Qii", 0, 0, 1) + struct.pack("=qqqiiii", 0, 400, 0, folder, CACHED, -1, 0)
    for number, wanted in enumerate((late, unreadable)):
        threads.submit(number, URGENT, address, wanted)
    assert {threads.wait()[:2], threads.wait()[:2]} == {(0, ENDS_EARLY), (1, SYSTEM)}
    for wrong in (b"", late[:-1], b"\xff" * 48):
        try:
            threads.submit(0, URGENT, address, wrong)
        except ValueError:
            continue
        raise AssertionError("not a request")


def mapped(threads: Any, file: int) -> None:
    """Pages of a mapped file, brought in by its own mapping."""
    with mmap.mmap(file, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as pages:
        start = ctypes.cdll.LoadLibrary("libc.so.6").mmap
        start.restype, start.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
        begin = start(None, len(CONTENT), mmap.PROT_READ, mmap.MAP_PRIVATE, file, 0)
        wanted = request([(0, 20 * PAGE, 0, MAPPED), (20 * PAGE, 40 * PAGE, 20 * PAGE, MAPPED)], file)
        threads.submit(7, SPECULATIVE, begin, wanted)
        assert threads.wait() == 7
        assert pages[: 60 * PAGE] == ctypes.string_at(begin, 60 * PAGE)


def interrupted(threads: Any) -> None:
    """Whoever waits is interrupted by a signal."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        threads.wait()
    except KeyboardInterrupt:
        return
    raise AssertionError("waits for a load that nobody asked for")


def counting(threads: Any, stop: threading.Event) -> None:
    """As the server's statistics, beside the thread that computes."""
    while not stop.wait(1e-3):
        threads.counters()


def main() -> None:
    with tempfile.NamedTemporaryFile(dir=os.environ.get("TMPDIR")) as handle:
        handle.write(CONTENT)
        handle.flush()
        os.fsync(handle.fileno())
        plain = os.open(handle.name, os.O_RDONLY)
        files = [(plain, False)]
        try:
            files.append((os.open(handle.name, os.O_RDONLY | os.O_DIRECT), True))
        except OSError:  # a file system without it
            files.append((plain, True))
        folder = os.open(os.path.dirname(handle.name), os.O_RDONLY)
        for count in (1, 2, 4):
            threads = io_check.IOThreads(count)
            stop = threading.Event()
            reader = threading.Thread(target=counting, args=(threads, stop), daemon=True)
            reader.start()
            use(threads, files, 400)
            fail(threads, plain, folder)
            mapped(threads, plain)
            interrupted(threads)
            stop.set()
            reader.join()
            for number in range(SLOTS):  # closed while loads are under way
                wanted = request(some_pieces(False), plain)
                threads.submit(number, number % 3, address + number * ROOM, wanted)
            threads.close()
        threads = io_check.IOThreads(4)  # never closed
        threads.submit(0, BACKGROUND, address, request(some_pieces(False), plain))
        del threads


main()
