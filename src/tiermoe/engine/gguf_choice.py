"""Choice among the GGUF files of a repository on the hub: by plans of their headers, before a download."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

from tiermoe.config import DEFAULT_BITS, Settings, format_size
from tiermoe.engine.budget import memory_budget
from tiermoe.engine.load import plan_for
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.errors import BudgetError, ModelError
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.model.hf.hub import Repository, fetch_headers, inspect_headers


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in GGUF files."""

    name: str  # of the first file, without the number of a shard
    files: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a candidate's headers say."""

    plan: MemoryPlan | None = None  # None: the budget does not do for it, or there is a problem
    bits: float = 0.0  # a weight, on average
    problem: ModelError | None = None  # why tiermoe does not run it

    @property
    def share(self) -> float:
        """Share of the experts that the budget holds; 0 if it does not do."""
        return self.plan.slots / self.plan.all_slots if self.plan else 0.0


def candidates(repository: Repository) -> list[Candidate]:
    """The models in GGUF files that a repository has, the largest first."""
    return [Candidate(name, tuple(files), repository.nbytes(files)) for name, files in repository.gguf_models().items()]


def choose(repository: Repository, settings: Settings) -> tuple[Candidate, str]:
    """(candidate, reason for people): the largest one of which the memory budget holds all experts. Where there is no
    such one, the smallest of at least `DEFAULT_BITS` bits a weight, since fewer lose quality visibly, else the largest
    of fewer; the budget holds what has to be resident of it. ModelError if tiermoe runs none of them, BudgetError
    where the budget does for none."""
    known, (budget, source) = candidates(repository), memory_budget(settings)

    @functools.cache
    def planned(candidate: Candidate) -> _Planned:
        return _planned(repository, candidate, settings)

    count = f"{len(known)} files" if len(known) > 1 else "1 file"
    for each in known:
        if each.nbytes <= budget and planned(each).share >= 1:  # of larger ones no header is asked for
            return each, f"the largest of {count} of which {format_size(budget)} ({source}) hold all experts"
    smallest = next((each for each in reversed(known) if planned(each).problem is None), None)
    if smallest is None:
        raise planned(known[0]).problem or ModelError(f"'{repository.name}' has no GGUF files")
    least = DEFAULT_BITS * smallest.nbytes / planned(smallest).bits  # bytes: all have as many weights
    enough = [each for each in reversed(known) if each.nbytes >= least]
    for each in (*enough, *(each for each in known if each.nbytes < least)):
        if planned(each).plan is not None:
            return each, (
                f"{format_size(budget)} ({source}) hold all experts of none of {count}; of this one, of "
                f"{planned(each).bits:.1f} bits a weight, they hold {planned(each).share:.0%}"
            )
    raise BudgetError(
        f"{format_size(budget)} ({source}) are too little for each of the {count} of '{repository.name}'; "
        f"raise --memory"
    )


def _planned(repository: Repository, candidate: Candidate, settings: Settings) -> _Planned:
    """ModelError if the hub cannot be asked."""
    headers = fetch_headers(repository, candidate.files)
    try:
        blueprint = inspect_headers(repository, headers, candidate.name)
    except ModelError as error:
        return _Planned(problem=error)
    checkpoint = blueprint.checkpoint
    assert isinstance(checkpoint, GgufCheckpoint)
    weights = sum(math.prod(tensor.shape) for tensor in checkpoint.file.tensors.values())
    bits = 8 * candidate.nbytes / weights
    with contextlib.closing(checkpoint):
        try:
            return _Planned(plan_for(blueprint, settings), bits)
        except BudgetError:
            return _Planned(None, bits)
        except ModelError as error:
            return _Planned(problem=error)
