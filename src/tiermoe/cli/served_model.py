"""A model's own process under `tiermoe serve A B`: `python -m tiermoe.cli.served_model serve MODEL …` is that command,
and ends when its standard input does: when the router has ended, however it ended."""

from __future__ import annotations

import os
import threading


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # nobody is left to answer; a thread that hangs would keep Python from it


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, name="tiermoe-router-lives", daemon=True).start()
    from tiermoe.cli.main import main

    main()
