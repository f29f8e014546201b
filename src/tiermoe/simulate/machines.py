"""Links by name: those of the papers' machines. Effective figures, of what a copy of a few MiB reaches, beside the
nominal ones; a figure measured on the machine at hand is better than any of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiermoe.config import parse_size
from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Machine:
    """A link: `bandwidth` in bytes per second, `latency` in seconds before a transfer's first byte."""

    name: str
    bandwidth: float
    latency: float
    source: str


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # PCIe: 80 % of the nominal rate, which is about what pinned copies reach; 10 us for a copy's start
        Machine("pcie1", 3.2e9, 1e-5, "PCIe 1.0 x16, 4 GB/s nominal (Fate, low-end PC), taken at 80 %"),
        Machine("pcie3", 12.8e9, 1e-5, "PCIe 3.0 x16, 16 GB/s nominal (Fate, high-end PC), taken at 80 %"),
        Machine("pcie4", 25.6e9, 1e-5, "PCIe 4.0 x16, 32 GB/s nominal (HOBBIT, CORM), taken at 80 %"),
        Machine("nvme", 3.0e9, 1e-4, "Samsung 980 PRO, 7 GB/s nominal, 'around 3,000 MB/s in practice' (HOBBIT)"),
        Machine("sata", 5.2e8, 1e-4, "Samsung 860 EVO, 550 MB/s nominal (EdgeMoE, Jetson TX2), taken at 95 %"),
        Machine("sdcard", 4.0e7, 1e-3, "SanDisk Ultra (EdgeMoE) in a Raspberry Pi 4B: 50 MB/s nominal, at 80 %"),
    )
}
"""Latencies are of the order that such devices have; no paper gives them."""

_RATE = re.compile(r"(.+?)\s*/\s*s(?:ec)?", re.IGNORECASE)


def parse_link(text: str) -> Machine:
    """A name of `MACHINES`, or a bandwidth like 16GB/s (then without latency). ConfigError on anything else."""
    if text.lower() in MACHINES:
        return MACHINES[text.lower()]
    rate = _RATE.fullmatch(text.strip())
    if rate is None:
        raise ConfigError(f"link {text!r} is neither a bandwidth like 16GB/s nor one of {', '.join(MACHINES)}")
    return Machine(text, float(parse_size(rate[1], "link")), 0.0, "as given")
