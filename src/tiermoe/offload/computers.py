"""How fast computers and drives are, by name: for an expectation before anything runs, and for replays.

Links have the figures of the papers' machines: effective ones, of what a copy of a few MiB reaches, and the nominal
ones. A figure measured on the machine at hand is better than any of them. Computers have the makers' or published
figures, lowered to what a program gets: memory to 80 % of its nominal rate, drives to 65 % of their sequential one,
arithmetic to half of cores x clock x operations a cycle."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from tiermoe.errors import ConfigError

MEMORY_SHARE, _DRIVE_SHARE, ARITHMETIC_SHARE = 0.8, 0.65, 0.5
_AVX2 = _APPLE = 32  # float32 operations of a core in a cycle: two FMA units of 256 bits; four of 128
_AVX512 = 64
_A76 = 16  # two FMA units of 128 bits, also of Cortex-A78


@dataclass(frozen=True, slots=True)
class NamedLink:
    """A link between a drive and main memory, or main memory and a GPU."""

    name: str
    bandwidth: float  # bytes per second
    latency: float  # seconds before a transfer's first byte
    source: str  # of the figures, for people
    copies: bool = False  # moves what a slot on a GPU holds, else what a store does


LINKS: dict[str, NamedLink] = {
    link.name: link
    for link in (
        # PCIe: 80 % of the nominal rate, which is about what pinned copies reach; 10 us for a copy's start
        NamedLink("pcie1", 3.2e9, 1e-5, "PCIe 1.0 x16, 4 GB/s nominal (Fate, low-end PC), taken at 80 %", True),
        NamedLink("pcie3", 12.8e9, 1e-5, "PCIe 3.0 x16, 16 GB/s nominal (Fate, high-end PC), taken at 80 %", True),
        NamedLink("pcie4", 25.6e9, 1e-5, "PCIe 4.0 x16, 32 GB/s nominal (HOBBIT, CORM), taken at 80 %", True),
        NamedLink("nvme", 3.0e9, 1e-4, "Samsung 980 PRO, 7 GB/s nominal, 'around 3,000 MB/s in practice' (HOBBIT)"),
        NamedLink("sata", 5.2e8, 1e-4, "Samsung 860 EVO, 550 MB/s nominal (EdgeMoE, Jetson TX2), taken at 95 %"),
        NamedLink("sdcard", 4.0e7, 1e-3, "SanDisk Ultra (EdgeMoE) in a Raspberry Pi 4B: 50 MB/s nominal, at 80 %"),
    )
}
"""Latencies are of the order that such devices have; no paper gives them."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is."""

    memory: float  # bytes a second
    drive: float  # bytes a second
    arithmetic: float  # float operations a second of matrix products on its processor
    source: str  # of the figures, for people
    torch_s: tuple[float, float] | None = None
    """Seconds a byte of a model's experts if torch's operators compute them, at best and on average; None if
    compiled kernels do."""


@dataclass(frozen=True, slots=True)
class Computer:
    """Nominal figures of a computer."""

    name: str
    memory: float  # GB/s
    drive: float  # GB/s
    cores: int  # that compute
    clock: float  # GHz
    operations: int  # float32 operations of a core in a cycle
    source: str  # of the first two, for people

    def rates(self) -> Rates:
        """What a program gets of the nominal figures."""
        arithmetic = self.cores * self.clock * self.operations * ARITHMETIC_SHARE
        return Rates(self.memory * MEMORY_SHARE * 1e9, self.drive * _DRIVE_SHARE * 1e9, arithmetic * 1e9, self.source)


COMPUTERS: dict[str, Computer] = {
    computer.name: computer
    for computer in (
        Computer("laptop-ddr4", 51.2, 3.5, 4, 3.0, _AVX2, "two channels of DDR4-3200; NVMe on PCIe 3.0 x4"),
        Computer("laptop-ddr5", 89.6, 7.0, 8, 3.5, _AVX2, "two channels of DDR5-5600; NVMe on PCIe 4.0 x4"),
        Computer("laptop-lpddr5x", 120, 7.0, 8, 3.5, _AVX2, "LPDDR5X-7500 of 128 bits; NVMe on PCIe 4.0 x4"),
        Computer("desktop-ddr4", 51.2, 7.0, 8, 4.0, _AVX2, "two channels of DDR4-3200; NVMe on PCIe 4.0 x4"),
        Computer("desktop-ddr5", 96, 7.0, 8, 4.5, _AVX512, "two channels of DDR5-6000; NVMe on PCIe 4.0 x4"),
        Computer("steam-deck", 88, 3.5, 4, 3.0, _AVX2, "Valve: LPDDR5-5500 of 128 bits; NVMe on PCIe 3.0 x4"),
        Computer("macbook-air-m1", 68, 2.9, 4, 3.2, _APPLE, "Apple: LPDDR4X-4266 of 128 bits; SSD as reviews measured"),
        Computer("macbook-air-m2", 100, 3.0, 4, 3.5, _APPLE, "Apple: 100 GB/s; SSD of 512 GB as reviews measured"),
        Computer("macbook-air-m2-256gb", 100, 1.5, 4, 3.5, _APPLE, "Apple: 100 GB/s; one flash chip, half the rate"),
        Computer("macbook-air-m3", 100, 3.0, 4, 4.0, _APPLE, "Apple: 100 GB/s; SSD as reviews measured"),
        Computer("macbook-pro-m1-pro", 200, 7.4, 8, 3.2, _APPLE, "Apple: 200 GB/s, SSD of up to 7.4 GB/s"),
        Computer("macbook-pro-m1-max", 243, 7.4, 8, 3.2, _APPLE, "cores read 243 of 400 GB/s (AnandTech, 2021); Apple"),
        Computer("macbook-pro-m3-pro", 150, 7.4, 6, 4.0, _APPLE, "Apple: 150 GB/s, SSD as of the M1 Pro"),
        Computer("mac-mini-m4", 120, 2.9, 4, 4.4, _APPLE, "Apple: 120 GB/s; SSD of 256 GB as reviews measured"),
        Computer("mac-mini-m4-pro", 273, 6.0, 8, 4.5, _APPLE, "Apple: 273 GB/s; SSD as reviews measured"),
        Computer("raspberry-pi-5", 17.1, 0.45, 4, 2.4, _A76, "LPDDR4X-4267 of 32 bits; NVMe on PCIe 2.0 x1"),
        Computer("raspberry-pi-5-sdcard", 17.1, 0.1, 4, 2.4, _A76, "LPDDR4X-4267 of 32 bits; microSD at SDR104"),
        Computer("orange-pi-5", 33.8, 0.45, 4, 2.4, _A76, "LPDDR4X-4224 of 64 bits; NVMe on PCIe 2.0 x1"),
        Computer("jetson-orin-nano", 68, 3.5, 6, 1.5, _A76, "NVIDIA: 68 GB/s, its CPU alone; NVMe on PCIe 3.0 x4"),
    )
}


DRIVES = {name: link for name, link in LINKS.items() if not link.copies}
"""Links that are drives: this machine's memory and processor with another drive."""


def named_rates(name: str) -> Rates | None:
    """The rates of a computer by name; None for a drive's name. ConfigError, with the known names, for any other."""
    if name in DRIVES:
        return None
    if name not in COMPUTERS:
        near = difflib.get_close_matches(name, [*COMPUTERS, *DRIVES], n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"unknown machine '{name}'{hint} (known: {', '.join(COMPUTERS)}; this one with another drive: "
            f"{', '.join(DRIVES)})"
        )
    return COMPUTERS[name].rates()


def with_drive(rates: Rates, name: str) -> Rates:
    """The same machine with one of `DRIVES`."""
    drive = DRIVES[name]
    return replace(rates, drive=drive.bandwidth, source=f"{rates.source}; drive: {drive.source}")
