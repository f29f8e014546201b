"""How cost grows (`python -m benchmarks.growth`)."""
