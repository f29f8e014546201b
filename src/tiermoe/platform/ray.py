"""Ray's start: processes on this machine, or on the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import os

_OBJECT_STORE_BYTES = 128 << 20  # tiermoe puts nothing large into Ray's object store


def start_ray(processors: int | None = None) -> None:
    """Starts Ray, which runs until `ray.shutdown`. processors: those of this machine that tasks may use; None: all."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports each start to its makers
    os.environ.setdefault("RAY_worker_niceness", "0")  # else 15, with which a replica waits for all other programs
    import ray

    if on_cluster():
        ray.init(log_to_driver=False)
    else:
        ray.init(
            num_cpus=processors, log_to_driver=False, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES
        )


def on_cluster() -> bool:
    """Whether Ray may run on other machines than this one."""
    return "RAY_ADDRESS" in os.environ
