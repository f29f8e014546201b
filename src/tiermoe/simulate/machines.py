"""How fast machines are, by name: links and the papers' machines for replays, computers for these and for an
expectation before anything runs.

Links have the figures of the papers' machines: effective ones, of what a copy of a few MiB reaches, beside the nominal
ones. A figure measured on the machine at hand is better than any of them. Computers have the makers' or published
figures, lowered to what a program gets: memory to 80 % of its nominal rate, drives to 65 % of their sequential one,
arithmetic to half of cores x clock x operations a cycle."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from tiermoe.config import parse_size
from tiermoe.errors import ConfigError

_MEMORY, _DRIVE, _ARITHMETIC = 0.8, 0.65, 0.5
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

HDD = NamedLink("hdd", 5.0e7, 1e-2, "MOVE SPEED YSUTSJ-64G2S, 50 MB/s nominal (EdgeMoE, section 4.1)")
"""A drive of EdgeMoE's; seeking is ours."""

_RATE = re.compile(r"(.+?)\s*/\s*s(?:ec)?", re.IGNORECASE)


def parse_link(text: str, what: str = "link") -> NamedLink:
    """The link of a name of `LINKS`, or of a bandwidth like 16GB/s, without latency. ConfigError, which says `what` was
    given, for anything else."""
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    rate = _RATE.fullmatch(text.strip())
    if rate is None:
        raise ConfigError(f"{what} {text!r} is neither a bandwidth like 16GB/s nor one of {', '.join(LINKS)}")
    return NamedLink(text, float(parse_size(rate[1], what)), 0.0, "as given")


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is."""

    memory: float  # bytes a second
    drive: float  # bytes a second
    arithmetic: float  # float operations a second of matrix products on its processor
    source: str  # of the figures, for people
    torch_s: tuple[float, float] | None = None
    """Seconds a byte of a model's experts where torch's operators compute them, at best and on average; None where
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
        arithmetic = self.cores * self.clock * self.operations * _ARITHMETIC
        return Rates(self.memory * _MEMORY * 1e9, self.drive * _DRIVE * 1e9, arithmetic * 1e9, self.source)


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


@dataclass(frozen=True, slots=True)
class Processor:
    """What computes."""

    rate: float  # bytes a second of weights that it gets through while it decodes
    source: str  # of the figures, for people
    arithmetic: float = 0.0  # float operations a second in prompts; 0 of one that computes none


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine for replays. link: fills the slots that the processor computes from."""

    name: str
    link: NamedLink
    processor: Processor | None = None  # None: computing takes what the trace measured, or what is given
    drive: NamedLink | None = None  # fills main memory, where that lies in between and does not hold every expert
    stores_all: bool = True  # main memory holds every expert unless it is said how many; else the drive fills slots
    cpu: Processor | None = None  # beside the processor

    def hops(self, second_level: bool) -> tuple[NamedLink, NamedLink | None]:
        """(what fills slots, the drive that fills main memory before it). second_level: main memory holds some of the
        experts. ConfigError where no main memory lies between a drive and the slots."""
        if not second_level:
            return (self.link if self.stores_all or self.drive is None else self.drive), None
        if self.drive is None:
            raise ConfigError(
                f"--ram divides the way from a drive to a GPU, and {self.name} has no such way; give --link pcie4 "
                f"--drive nvme, or a machine with both: {', '.join(name for name, m in MACHINES.items() if m.drive)}"
            )
        return self.link, self.drive

    def described(self, second_level: bool) -> dict[str, str]:
        """Its parts as they are replayed, each with its figure and where it comes from."""
        link, drive = self.hops(second_level)
        parts = {"link": (link.bandwidth, link.source)}
        if drive is not None:
            parts["drive"] = (drive.bandwidth, drive.source)
        for name, processor in (("processor", self.processor), ("cpu", self.cpu)):
            if processor is not None:
                parts[name] = (processor.rate, processor.source)
        return {"machine": self.name} | {name: f"{rate / 1e9:.3g} GB/s: {told}" for name, (rate, told) in parts.items()}


def _gpu(memory: float, teraflops: float, source: str) -> Processor:
    """A GPU by its maker's figures: GB/s of memory, float32 operations a second."""
    return Processor(
        memory * _MEMORY * 1e9, f"{source}: {memory:g} GB/s, taken at 80 %", teraflops * _ARITHMETIC * 1e12
    )


def _cpu(memory: float, source: str) -> Processor:
    """A CPU beside a GPU by its memory's nominal GB/s."""
    return Processor(memory * _MEMORY * 1e9, f"{source}: {memory:g} GB/s nominal, taken at 80 %")


def _unified(memory: float) -> NamedLink:
    """A copy within memory that CPU and GPU share; it reads and writes. memory: nominal GB/s."""
    rate = memory * _MEMORY / 2 * 1e9
    return NamedLink("unified", rate, 1e-5, f"a copy within {memory:g} GB/s of memory, taken at 80 %, halved", True)


# Mixtral's experts have 176 M weights each, a layer's attention 42 M (HOBBIT's table 1 model)
_MIXTRAL_EXPERT, _MIXTRAL_ATTENTION = 176.2e6, 41.9e6
_ST_BASE_8_TOKEN = 0.495e9
"""Bytes of a decoded token's weights in ST-base-8 at float32: 12 layers of width 768, six of them with one of the
experts of 18.9 MB, and the vocabulary's 32,128."""


def _layer_rate(loading: float, link: NamedLink, nbytes: int) -> float:
    """Bytes a second of a processor that computes a Mixtral layer of `nbytes` a weight in the share 1 - `loading` of
    the time, while two experts come over `link` in the other share (HOBBIT, figure 3-(a))."""
    loading_s = 2 * _MIXTRAL_EXPERT * nbytes / link.bandwidth
    return (2 * _MIXTRAL_EXPERT + _MIXTRAL_ATTENTION) * nbytes / (loading_s * (1 - loading) / loading)


_TX2 = Processor(
    _ST_BASE_8_TOKEN / (0.789 / 3.55),
    "EdgeMoE, figures 3 and 16: ST-base-8 takes .789 s a token, 3.2 to 3.9 times as long as without I/O",
    0.665 * _ARITHMETIC * 1e12,  # NVIDIA: 256 cores at 1.3 GHz
)

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "rtx4090",
            LINKS["pcie4"],
            Processor(
                _layer_rate(0.855, LINKS["pcie4"], 2),
                "HOBBIT, figure 3-(a): 85.5 % of a float16 Mixtral layer is loading, here two experts over PCIe",
                82.6 * _ARITHMETIC * 1e12,  # NVIDIA
            ),
            LINKS["nvme"],
            cpu=Processor(2 * _MIXTRAL_EXPERT / 5e-3, "HOBBIT, section 5.4: a float16 expert of Mixtral takes 5 ms"),
        ),
        Machine(
            "jetson-orin",
            _unified(204.8),
            Processor(
                _layer_rate(0.945, LINKS["nvme"], 1),
                "HOBBIT, figure 3-(a): 94.5 % of an int8 Mixtral layer is loading, here two experts from the SSD",
                5.3 * _ARITHMETIC * 1e12,  # NVIDIA: 2,048 cores at 1.3 GHz
            ),
            LINKS["nvme"],
            stores_all=False,
        ),
        Machine("jetson-tx2", _unified(59.7), _TX2, LINKS["sata"], stores_all=False),
        Machine("jetson-tx2-hdd", _unified(59.7), _TX2, HDD, stores_all=False),
        Machine(
            "raspberry-pi-4b",
            LINKS["sdcard"],
            Processor(
                _ST_BASE_8_TOKEN / (6 * 18.9e6 / LINKS["sdcard"].bandwidth / 2.55),
                "EdgeMoE, figure 3: a token takes 3.3 to 3.8 times as long as without I/O, here of six experts of "
                "18.9 MB from the card",
                4 * 1.5e9 * 8 * _ARITHMETIC,  # four Cortex-A72 at 1.5 GHz
            ),
        ),
        Machine(
            "rtx3090", LINKS["pcie3"], _gpu(936, 35.6, "NVIDIA (13 ms a block, section 3, is not of 14 tok/s)"),
            cpu=_cpu(85.3, "Intel i9-9900X (Fate, section 5.1), four channels of DDR4-2666"),
        ),
        Machine(
            "low-end-pc", LINKS["pcie1"], _gpu(484, 11.3, "NVIDIA GTX 1080 Ti (Fate, section 5.1)"),
            cpu=_cpu(76.8, "Intel E5-2650 v4 (Fate, section 5.1), four channels of DDR4-2400"),
        ),
        Machine(
            "rtx4080", LINKS["pcie4"], _gpu(716.8, 48.7, "NVIDIA (MoBiLE, section IV)"),
            cpu=_cpu(51.2, "Intel i5-12400 (MoBiLE, section IV), two channels of DDR4-3200"),
        ),
        Machine(
            "rtx3090ti", LINKS["pcie4"], _gpu(1008, 40.0, "NVIDIA (CORM, section 5)"),
            cpu=_cpu(140.8, "Intel Xeon Gold 6226R (CORM, section 5), six channels of DDR4-2933"),
        ),
    )
}  # fmt: skip
"""The papers' machines. A figure that a paper measured comes before a maker's; one that neither has is ours."""


def machine_of(name: str | None, link: str | None, drive: str | None) -> Machine:
    """The machine of a name of `MACHINES` or `COMPUTERS`, or one with a link and a drive as `parse_link` takes them.
    ConfigError, with the known names, for an unknown one, and where both or neither are given."""
    if name is None:
        if link is None:
            raise ConfigError(
                f"how fast is the link? give --link 16GB/s, or a name: {', '.join(LINKS)}; or --machine with one of "
                f"{', '.join(MACHINES)}"
            )
        return Machine(link, parse_link(link), drive=parse_link(drive, "drive") if drive else None)
    if link is not None or drive is not None:
        raise ConfigError(f"machine {name} has links of its own; leave --link and --drive out, or --machine")
    if name in MACHINES:
        return MACHINES[name]
    if name not in COMPUTERS:
        near = difflib.get_close_matches(name, [*MACHINES, *COMPUTERS], n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"unknown machine '{name}'{hint} (known: {', '.join([*MACHINES, *COMPUTERS])})")
    computer = COMPUTERS[name]
    rates = computer.rates()
    return Machine(
        name,
        NamedLink(name, rates.drive, 1e-4, f"{computer.source}; its drive, taken at 65 %"),
        Processor(rates.memory, f"{computer.source}; its memory, taken at 80 %", rates.arithmetic),
    )


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
