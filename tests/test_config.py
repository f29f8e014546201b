"""Settings, and sizes as people write them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.config import BITS, CacheSize, Settings, format_size, parse_cache, parse_size, settings
from tiermoe.errors import ConfigError

UNITS = {"": 1, "B": 1, "K": 2**10, "KiB": 2**10, "KB": 10**3, "M": 2**20, "MiB": 2**20, "MB": 10**6,
         "G": 2**30, "GiB": 2**30, "GB": 10**9, "T": 2**40, "TiB": 2**40, "TB": 10**12}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 << 30),
        ("700M", 700 << 20),
        ("1.5 GB", 1_500_000_000),
        (" 3mib ", 3 << 20),
        (4096, 4096),
        ("0.5k", 512),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(1, 10**15), st.integers(0, 999), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes_are_exact(whole: int, thousandths: int, unit: str, space: str) -> None:
    assert parse_size(f"{whole}.{thousandths:03d}{space}{unit}") == int(
        (whole + Fraction(thousandths, 1000)) * UNITS[unit]
    )
    assert parse_size(f"{whole}{space}{unit.lower()}") == whole * UNITS[unit]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "banana",
        "-1G",
        "1e9",
        "6 Gigs",
        "1.5.2G",
        "0",
        "0.0001",
        "nan",
        "inf",
        "٣GiB",
        "6GiB\n7",
        "9" * 400,
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^memory .*write it like 6GiB"):
        parse_size(text, "memory")


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError:
        size = 1
    assert size > 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3.54 * 2**20, "3.54 MiB"),
        (700 << 20, "700 MiB"),
        (6 << 30, "6 GiB"),
        (1 << 50, "1024 TiB"),
        (12.34 * 2**30, "12.3 GiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_formatting(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(1, 2**60))
def test_a_formatted_size_reads_back_within_its_digits(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.006


def test_caches() -> None:
    assert parse_cache("25%") == CacheSize(fraction=0.25)
    assert parse_cache(" 100 % ") == CacheSize(fraction=1.0)
    assert parse_cache("3MiB") == CacheSize(nbytes=3 << 20)
    assert parse_cache(4096) == CacheSize(nbytes=4096)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "nan%", "many%", "%", "lots"])
def test_what_is_no_cache_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cache "):
        parse_cache(text)


def test_settings_from_text(tmp_path: Path) -> None:
    made = settings(memory="6GiB", cache="25%", gpu_memory="1GiB", store=str(tmp_path), bits=2)
    assert made == Settings(memory=6 << 30, cache=CacheSize(fraction=0.25), gpu_memory=1 << 30, store=tmp_path, bits=2)
    assert settings() == Settings()
    assert settings(memory=None, cache=None, store=None) == Settings()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("memry", "did you mean 'memory'"),
        ("dense_bit", "did you mean 'dense_bits'"),
        ("xyzzy", "known: also, batch"),
    ],
)
def test_unknown_names_are_refused_with_a_near_one(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'.*{hint}"):
        settings(**{name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", "4"),
        ("bits", 4.0),
        ("kv_bits", 3),
        ("kv_bits", "8"),
        ("kv_bits", True),
        ("kv_bits", None),
        ("chunk", "512"),
        ("chunk", 1.5),
        ("chunk", True),
        ("batch", 0),
        ("lanes", 65),
        ("device", None),
        ("preset", 3),
        ("store", 5),
        ("memory", -1),
        ("memory", [1]),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} ") as refused:
        settings(**{name: value})
    assert str(value) in str(refused.value)


def test_dense_layers_follow_the_experts() -> None:
    assert {bits: settings(bits=bits).dense_bits_used for bits in BITS} == {16: 16, 8: 8, 4: 4, 3: 4, 2: 4}
    assert settings(bits=16, dense_bits=4).dense_bits_used == 4
    assert settings(bits=2, dense_bits=16).dense_bits_used == 16
