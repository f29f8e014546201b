"""The ways through the engine are as short as docs/life-of-a-token.md says."""

from __future__ import annotations

import pytest

from calls_document import counts, written
from tiermoe.native import available

MOST = [200, 500, 45, 8, 10, 8, 10]
"""In the order of the page."""


@pytest.mark.skipif(not available(), reason="needs the native kernels")
def test_the_page_says_how_long_the_ways_are() -> None:
    found = counts()
    assert found == written()
    assert all(count <= most for count, most in zip(found.values(), MOST, strict=True))
