"""What decides for a model's experts: layers, prefetches and the background, over one cache and one link. No torch, no
files, no clock of its own.

The engine gives the controller a real link, a simulator a virtual one: both run these very decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tiermoe.decide.layer_run import ELSEWHERE, LayerRun
from tiermoe.decide.loads import Loads
from tiermoe.types import Demand, Ready

__all__ = ["ELSEWHERE", "Controller"]


class Controller(Loads):
    """Runs layers over its cache and its link."""

    def run_layer(
        self,
        layer: int,
        demands: Sequence[Demand],
        speculate: Callable[[], None] | None = None,
        together: bool = False,
        elsewhere: Callable[[int], int] | None = None,
    ) -> Iterator[list[Ready]]:
        """Yields every demand that is not skipped, in groups that can be computed together, in the order in which they
        can: what is here first, by falling number of tokens (EdgeMoE's re-batching: each expert comes once a chunk;
        Fate's popularity order). An expert stays in its slot until the next group is asked for.

        speculate: called once, as soon as this layer needs nothing more from the link (that is when a prefetch can
        begin). together: computing starts when all loads are there, as far as the slots allow (HOBBIT). elsewhere: of
        so many experts that tokens need and that are neither here nor on their way, how many are not loaded: those of
        the fewest tokens. They are yielded with the slot ELSEWHERE in the precision demanded, before all else, so that
        their computing begins before this device is given work (HOBBIT, section 4, CPU-GPU cooperative computing).
        All that is here is one group; while misses wait for slots each expert is one, so that its slot is free for a
        load as soon as it is computed.
        Raises LoadError where an expert cannot be read. `roll_back` after that, and after a run that was not taken to
        its end."""
        return LayerRun(self, layer, demands, speculate, elsewhere).steps(together)
