"""Scripts that measure: run them from the repository's root with ``python -m benchmarks.NAME``."""
