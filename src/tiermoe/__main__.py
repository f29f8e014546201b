"""`python -m tiermoe`."""

from tiermoe.cli import main

main()
