"""The `tiermoe` command."""

from tiermoe.cli.main import main

__all__ = ["main"]
