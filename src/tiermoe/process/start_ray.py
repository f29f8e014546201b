"""Ray, which runs processes side by side: on this machine alone, or where RAY_ADDRESS names a cluster, on that."""

from __future__ import annotations

import os

_OBJECTS_BYTES = 128 << 20  # of Ray's store of objects, which holds nothing large of ours


def start_ray(processors: int | None = None) -> None:
    """Until `ray.shutdown`. processors: that it may give to tasks on this machine; None: as many as it finds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray tells its makers of each start
    import ray

    if on_cluster():
        ray.init(log_to_driver=False)
    else:
        ray.init(num_cpus=processors, log_to_driver=False, include_dashboard=False, object_store_memory=_OBJECTS_BYTES)


def on_cluster() -> bool:
    """Whether Ray runs on other machines than this one, or may."""
    return "RAY_ADDRESS" in os.environ
