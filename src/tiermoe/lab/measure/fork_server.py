"""What the process has imported that evaluations fork from: torch and the engine, once for all of them."""

from tiermoe.platform import process_memory

process_memory.import_libraries(own_process=True)

from tiermoe.lab.measure import evaluate, texts  # noqa: E402  (torch comes as `process_memory` prepares it)

__all__ = ["evaluate", "texts"]
