"""What the process has imported that evaluations fork from: torch and the engine, once for all of them."""

from tiermoe.process import footprint

footprint.import_libraries(own_process=True)

from tiermoe.measure import evaluate, windows  # noqa: E402  (torch comes as `footprint` prepares it)

__all__ = ["evaluate", "windows"]
