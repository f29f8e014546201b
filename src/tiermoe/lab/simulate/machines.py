"""Machines for replays: the papers', computers by name, and links as they are given.

A figure measured on the machine at hand is better than any of them (`offload.computers` says how they are lowered)."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tiermoe.config import parse_size
from tiermoe.errors import ConfigError
from tiermoe.lab.sizes import DEEPSEEK_MOE, MIXTRAL, ST_BASE_8
from tiermoe.lab.trace import Costs
from tiermoe.offload.computers import ARITHMETIC_SHARE, COMPUTERS, LINKS, MEMORY_SHARE, NamedLink

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


GPU_LAYER_S, CPU_LAYER_S = 5.5e-4, 3.3e-5
"""Seconds of Python and launches of a layer in our own decoder, by torch's operators and by native kernels, of models
whose computing takes next to nothing (docs/results.md, "A layer's Python and launches")."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What computes."""

    rate: float  # bytes a second of weights that it gets through while it decodes
    source: str  # of the figures, for people
    arithmetic: float = 0.0  # float operations a second in prompts; 0 of one that computes none
    layer_s: float = 0.0  # seconds of Python and launches of a pass's layer, whatever its size


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine for replays. link: fills the slots that the processor computes from."""

    name: str
    link: NamedLink
    processor: Processor | None = None  # None: computing takes what the trace measured, or what is given
    drive: NamedLink | None = None  # fills main memory, where that lies in between and does not hold every expert
    stores_all: bool = True  # main memory holds every expert unless it is said how many; else the drive fills slots
    cpu: Processor | None = None  # beside the processor
    lanes: int = 1  # transfers at once
    memory: float = 0.0  # bytes a second of a copy within main memory, for experts that lie there; 0: not measured

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
        told = {name: f"{rate / 1e9:.3g} GB/s: {source}" for name, (rate, source) in parts.items()}
        if self.processor is not None:
            told["processor"] += f"; Python and launches: {self.processor.layer_s * 1e3:.2g} ms a layer"
        return {"machine": self.name} | told


def _gpu(memory: float, teraflops: float, source: str) -> Processor:
    """A GPU by its maker's figures: GB/s of memory, float32 operations a second."""
    rate, arithmetic = memory * MEMORY_SHARE * 1e9, teraflops * ARITHMETIC_SHARE * 1e12
    return Processor(rate, f"{source}: {memory:g} GB/s, taken at 80 %", arithmetic, GPU_LAYER_S)


def _timed(nbytes: float, seconds: float, source: str, arithmetic: float, layer_s: float = GPU_LAYER_S) -> Processor:
    """A processor on which a paper's own engine took `seconds` for a decoded token's layer of `nbytes` bytes, Python
    and launches within: as ours, so that the layer takes what was measured, and a smaller one no less than these."""
    return Processor(nbytes / (seconds - layer_s), source, arithmetic * ARITHMETIC_SHARE, layer_s)


def _cpu(memory: float, source: str) -> Processor:
    """A CPU beside a GPU by its memory's nominal GB/s."""
    return Processor(memory * MEMORY_SHARE * 1e9, f"{source}: {memory:g} GB/s nominal, taken at 80 %")


def _unified(memory: float) -> NamedLink:
    """A copy within memory that CPU and GPU share; it reads and writes. memory: nominal GB/s."""
    rate = memory * MEMORY_SHARE / 2 * 1e9
    return NamedLink("unified", rate, 1e-5, f"a copy within {memory:g} GB/s of memory, taken at 80 %, halved", True)


# CORM's table 3, seconds of a token with int4 experts on demand: Mixtral (32 layers, two experts), and DeepSeekMoE (27
# MoE layers of 28, six experts). Two models give two unknowns each: what a transfer and a layer take whatever their
# size, and a rate.
_INT4 = 4.25 / 8  # bytes a weight: groups of 64 with scales that are quantised again (CORM, section 5)
_LOADING = ((2.1 / (32 * 2), MIXTRAL.expert * _INT4), (0.706 / (27 * 6), DEEPSEEK_MOE.expert * _INT4))
_COMPUTING = (
    (0.35 / 32, 2 * MIXTRAL.expert * _INT4 + 2 * MIXTRAL.dense),
    (0.13 / 28, 6 * DEEPSEEK_MOE.expert * _INT4 + 2 * DEEPSEEK_MOE.dense),
)


def _fitted(measured: tuple[tuple[float, float], tuple[float, float]]) -> tuple[float, float]:
    """(bytes a second, seconds of no bytes) of two (seconds, bytes)."""
    (long, many), (short, few) = measured
    rate = (many - few) / (long - short)
    return rate, short - few / rate


_CORM_LINK, _CORM_GPU = _fitted(_LOADING), _fitted(_COMPUTING)

_TX2 = _timed(
    4 * (ST_BASE_8.expert + ST_BASE_8.dense),
    0.789 / 3.55 / 6,
    "EdgeMoE, figures 3 and 16: ST-base-8 takes .789 s a token, 3.2 to 3.9 times as long as without I/O",
    0.665e12,  # NVIDIA: 256 cores at 1.3 GHz
)

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "rtx4090",
            LINKS["pcie4"],
            _timed(
                2 * (2 * MIXTRAL.expert + MIXTRAL.dense),
                3e-3,
                "HOBBIT, section 2: a float16 layer of Mixtral takes about 3 ms",
                82.6e12,  # NVIDIA
            ),
            LINKS["nvme"],
            cpu=Processor(2 * MIXTRAL.expert / 5e-3, "HOBBIT, section 5.4: a float16 expert of Mixtral takes 5 ms"),
        ),
        Machine(
            "jetson-orin",
            _unified(204.8),
            _timed(
                2 * MIXTRAL.expert + MIXTRAL.dense,
                2 * MIXTRAL.expert / LINKS["nvme"].bandwidth * (1 - 0.945) / 0.945,
                "HOBBIT, figure 3-(a): 94.5 % of an int8 Mixtral layer is loading, here two experts from the SSD",
                5.3e12,  # NVIDIA: 2,048 cores at 1.3 GHz
            ),
            LINKS["nvme"],
            stores_all=False,
        ),
        Machine("jetson-tx2", _unified(59.7), _TX2, LINKS["sata"], stores_all=False),
        Machine("jetson-tx2-hdd", _unified(59.7), _TX2, HDD, stores_all=False),
        Machine(
            "raspberry-pi-4b",
            LINKS["sdcard"],
            _timed(
                4 * (ST_BASE_8.expert + ST_BASE_8.dense),
                4 * ST_BASE_8.expert / LINKS["sdcard"].bandwidth / 2.55,
                "EdgeMoE, figure 3: a token takes 3.3 to 3.8 times as long as without I/O, here of six experts of "
                "18.9 MB from the card",
                4 * 1.5e9 * 8,  # four Cortex-A72 at 1.5 GHz
                CPU_LAYER_S,
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
            "rtx3090ti",
            NamedLink("corm", *_CORM_LINK, "CORM, table 3: experts on demand in Mixtral and DeepSeekMoE", True),
            Processor(
                _CORM_GPU[0], "CORM, table 3: computing of Mixtral and DeepSeekMoE", 40.0 * ARITHMETIC_SHARE * 1e12,
                _CORM_GPU[1],
            ),
            cpu=_cpu(140.8, "Intel Xeon Gold 6226R (CORM, section 5), six channels of DDR4-2933"),
        ),
    )
}  # fmt: skip
"""The papers' machines. A figure that a paper measured comes before a maker's; one that neither has is ours."""


def traced_machine(costs: Costs) -> Machine:
    """The machine that a trace was recorded on."""
    link = NamedLink("traced", costs.bandwidth, costs.latency, "as the trace measured")
    return Machine("this", link, lanes=costs.lanes, memory=costs.memory)


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
        Processor(rates.memory, f"{computer.source}; its memory, taken at 80 %", rates.arithmetic, CPU_LAYER_S),
    )
