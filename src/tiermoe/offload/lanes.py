"""How many reads of experts are in flight at once: learned while they are read, from what the drive gives."""

from __future__ import annotations

import math

FIRST, MOST = 8, 16
"""Reads in flight at first, and at most, of each drive. Reads of a MB by 16 threads were at most a fifth faster than by
8, and by 32 no faster than by 16."""
_READS = 2  # a window has as many reads as so many times those in flight
_WON, _LOST = 0.6, -0.3  # sums of the pairs' logarithms that end a trial
_TIE = 0.03  # what a pair takes off the sum: a number that is as good changes nothing
_MOST_OF_A_PAIR = 0.7  # a burst is no proof
_PAUSE, _LONGEST_PAUSE = 8, 64  # windows between trials that changed nothing


class Lanes:
    """Reads in flight, at most `most`. Now and then half or twice as many (the rival) are tried by turns with the usual
    number, since a drive's rate varies more with the second than with the number of reads: windows in the order U R R
    U, of which two make a pair. The logarithms of rival's rate by usual rate are added up, until the sum says who is
    better: twice the rate needs one pair, a tenth more some eight, and what is as fast stays untried for a while.

    `limit`: reads in flight in the window that is under way. Reads count while more than `floor` are asked for: below,
    both numbers are the same. `record` takes a window of `reads` of them."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.limit = self._usual = min(FIRST, most)
        self._up = True  # where the rival is
        self._changed = True  # since the trial before this one
        self._pause, self._resting = _PAUSE, 0
        self._begin()

    def _begin(self) -> None:
        """A trial."""
        self._rival = min(2 * self._usual, self.most) if self._up else max(self._usual // 2, 1)
        self._windows = 0
        self._pair = 0.0
        self._sum = 0.0

    @property
    def floor(self) -> int:
        """The smaller of both numbers."""
        return min(self._usual, self._rival)

    @property
    def reads(self) -> int:
        """Of a window."""
        return _READS * max(self._usual, self._rival)

    def record(self, nbytes: float, seconds: float) -> None:
        """A window in which `limit` reads were in flight has moved so many bytes; the next one begins."""
        if self._resting:
            self._resting -= 1
        elif self._rival == self._usual:
            self._end(False)
        else:
            rate = math.log(max(nbytes, 1.0) / max(seconds, 1e-9))
            self._pair += rate if self.limit == self._rival else -rate
            self._windows += 1
            if self._windows % 2 == 0:
                self._sum += max(-_MOST_OF_A_PAIR, min(self._pair, _MOST_OF_A_PAIR)) - _TIE
                self._pair = 0.0
                if not _LOST < self._sum < _WON:
                    self._end(self._sum > 0)
        self.limit = self._rival if not self._resting and self._windows % 4 in (1, 2) else self._usual

    def _end(self, won: bool) -> None:
        """Ends a trial. After two that changed nothing, one each way, there is none for a while."""
        if won:
            self._usual, self._pause = self._rival, _PAUSE
        else:
            self._up = not self._up
            if not self._changed:
                self._resting, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self._changed = won or not self._changed
        self._begin()
