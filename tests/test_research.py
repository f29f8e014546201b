"""The researcher's page: its commands with the example's preset, from beginning to end."""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from commands import Command
from tiermoe import native

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "research.md").read_text()


@pytest.mark.skipif(not native.available(), reason="needs the native kernels, without which nothing is measured")
@pytest.mark.usefixtures("plain_tables")
def test_the_commands_of_the_page(tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder like that of a clone, with the shipped model in the place of the wide one."""
    pytest.importorskip("matplotlib")
    for name, place in (("examples", "examples"), ("data", "data"), ("W", "models/stories-7m")):
        (tmp_path / name).symlink_to(ROOT / place)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    tiermoe (.*)$", PAGE, re.MULTILINE)
    assert {line.split()[0] for line in commands} == {"presets", "run", "eval", "compare", "trace", "simulate"}
    said = {}
    for line in commands:
        ended = tiermoe_(*shlex.split(line))
        assert ended.code == 0, (line, ended.err)
        assert "not measured" not in ended.err
        said[line] = ended.out + ended.err
    own = [line for line in commands if "quick-copies" in line and not line.startswith("run")]
    assert [line for line in own if "quick-copies" not in said[line]] == []
    assert len([line for line in said if "kernels native" in said[line] and line.startswith("run")]) == 2
    (picture,) = re.findall(r"--picture (\S+)", PAGE)
    assert ET.parse(picture).getroot().tag.endswith("svg")
