"""Run a command in a memory cgroup of its own, after dropping files from the page cache (`tiermoe.bench.limit`).

python -m benchmarks.memory_limit 700M --drop model.gguf -- COMMAND ...
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from tiermoe.bench.limit import CannotLimit, Hierarchy, find_hierarchy, run_limited

__all__ = ["CannotLimit", "Hierarchy", "find_hierarchy", "parse_size", "run_limited"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "700M", "2G", "1048576" (powers of 1024; "MiB" means the same)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 700M or 2G")
    return int(match[1]) * UNITS[match[2].upper()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("limit", type=parse_size, help="such as 700M or 2G")
    parser.add_argument("--drop", type=Path, action="append", default=[], help="file to drop from the page cache")
    parser.add_argument("command", nargs="+", help="the command, after --")
    args = parser.parse_args()
    try:
        result, _ = run_limited(args.command, args.limit, args.drop)
    except CannotLimit as error:
        sys.exit(f"memory limit: {error}")
    print(json.dumps(asdict(result)), file=sys.stderr)
    sys.exit(result.returncode if result.returncode >= 0 else 128 - result.returncode)


if __name__ == "__main__":
    main()
