"""Microbenchmarks of the CPU kernels (`python -m benchmarks.kernels`)."""
