"""Trial of a grammar in a process of its own, with limits of time and memory: `python -P grammar_trial.py`. It also
converts a grammar to Lark.

llguidance has limits, but some grammars pass by them: the automaton of a `multipleOf` has as many states as its number,
which llguidance does not count. A grammar that passes here takes no more in the server. The trial imports nothing of
tiermoe, so that it starts within a tenth of a second.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path
from typing import Any

_STEPS = 64  # of an answer that is tried: the cost of a grammar often shows after its first bytes


class Bytes:
    """A vocabulary of bytes, of special tokens and an end."""

    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.eos_token_id = 256
        self.tokens = [bytes([each]) for each in range(256)] + [b"<end>", *(each.encode() for each in special)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def limit(seconds: int, memory: int) -> None:
    """Limits the process to `seconds` of processor time and `memory` bytes more than it has now."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # whose first signal says why
    if sys.platform == "linux":
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def fault(rules: str, special: list[str], limits: dict[str, Any]) -> str:
    """Why a grammar cannot be compiled, or an answer by it begun; empty where both can."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    tokens = LLTokenizer(TokenizerWrapper(Bytes(special)))
    matcher, chance = LLMatcher(tokens, rules, log_level=0, limits=LLParserLimits(**limits)), random.Random(0)
    for _ in range(_STEPS):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(mask.bit_length()) if mask >> token & 1]
        if allowed:
            matcher.consume_token(chance.choice(allowed))
    return str(matcher.get_error())


def main() -> None:
    asked = json.load(sys.stdin)
    from llguidance.gbnf_to_lark import any_to_lark  # the library's own memory is not the grammar's

    limit(asked["seconds"], asked["memory"])
    converted = "grammar" in asked
    found = any_to_lark(asked["grammar"]) if converted else fault(asked["rules"], asked["special"], asked["limits"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
