"""What the benchmarks share: perplexity, the memory limit, the checkpoint reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks.memory_limit import CannotLimit, Hierarchy, find_hierarchy, parse_size, run_limited
from benchmarks.perplexity import perplexity, windows
from tiermoe.bench.llama.checkpoint import Checkpoint
from tiny import write

V1 = "36 31 0:33 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_IN_CONTAINER = "36 31 0:33 /docker/7f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "31 23 0:28 / /proc rw - proc proc rw\n"


@given(st.integers(2, 200), st.integers(2, 40), st.data())
def test_windows_score_every_token_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    found = list(windows(length, context, stride))
    scored = [position for _, end, first in found for position in range(first, end)]
    unscored = set(range(context, length, context)) if stride == context else set()
    assert scored == [position for position in range(1, length) if position not in unscored]
    for begin, end, first in found:
        assert end - begin <= context
        assert first > begin
        assert begin == 0 or stride == context or first - begin == context - stride


def test_perplexity_is_that_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    table = 5 * torch.randn(11, 11, generator=generator)
    ids = torch.randint(0, 11, (50,), generator=generator)

    def logits_fn(window: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = (1000 + table[torch.from_numpy(window)]).numpy()
        return array

    result = perplexity(logits_fn, ids.numpy(), context=8, stride=3)
    expected = torch.nn.functional.cross_entropy(table[ids[:-1]], ids[1:]).exp()
    assert result.tokens == 49
    assert result.value == pytest.approx(expected.item(), rel=1e-4)


def test_perplexity_refuses_what_it_cannot_score() -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="1 tokens leave nothing"):
        perplexity(lambda ids: np.zeros((len(ids), 4), dtype=np.float32), one, 8, 4)
    with pytest.raises(ValueError, match="stride 9"):
        list(windows(20, 8, 9))


@pytest.mark.parametrize(
    ("mounts", "membership", "expected"),
    [
        (OTHER + V1, "4:memory:/a/b\n0::/\n", Hierarchy(1, Path("/sys/fs/cgroup/memory/a/b"))),
        (V1_IN_CONTAINER, "4:memory:/docker/7f\n", Hierarchy(1, Path("/sys/fs/cgroup/memory"))),
        (V1 + V2, "4:memory:/a\n0::/b\n", Hierarchy(1, Path("/sys/fs/cgroup/memory/a"))),
        (V2, "0::/user.slice/run.scope\n", Hierarchy(2, Path("/sys/fs/cgroup/user.slice"))),
        (V2, "0::/\n", Hierarchy(2, Path("/sys/fs/cgroup"))),
    ],
)
def test_where_a_memory_group_goes(mounts: str, membership: str, expected: Hierarchy) -> None:
    assert find_hierarchy(mounts, membership) == expected


def test_no_memory_controller_is_said() -> None:
    with pytest.raises(CannotLimit, match="no cgroup file system"):
        find_hierarchy(OTHER, "3:cpuset:/\n")


@pytest.mark.parametrize(("text", "size"), [("700M", 700 << 20), ("2 GiB", 2 << 30), ("4096", 4096), ("1k", 1024)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "banana", "1.5G", "-1M", "7T"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_the_limit_holds_and_the_group_goes() -> None:
    before = sys.executable, "-c"
    limit = 80 << 20
    try:
        kept, output = run_limited([*before, "print(len(bytes(1 << 20)))"], limit, stdout=subprocess.PIPE)
    except CannotLimit as error:
        pytest.skip(str(error))
    assert (kept.returncode, kept.oom_kills, output) == (0, 0, "1048576\n")
    assert kept.peak_bytes is None or 0 < kept.peak_bytes <= limit
    killed, _ = run_limited([*before, "bytearray(200 << 20)"], limit)
    assert killed.returncode != 0
    assert killed.oom_kills > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_checkpoint_reader_agrees_with_safetensors(tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    write(tmp_path, "qwen3_moe", dtype, shard=shard)
    checkpoint, seen = Checkpoint(tmp_path), 0
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                np.testing.assert_array_equal(checkpoint.float32(name), opened.get_tensor(name).float().numpy())
                seen += name in checkpoint
    assert seen > 50
