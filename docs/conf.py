"""The site: `make site` builds it with Sphinx from the Markdown files of the repository and the docstrings.

The source folder is the repository, so a link between README, docs/ and benchmarks/ is the same on a forge and in the
site. A link that leads nowhere ends the build (`-n -W`). The theme loads nothing from elsewhere."""

from typing import Any

from tiermoe.version import VERSION

project = "tiermoe"
version = release = VERSION
copyright = "the tiermoe developers"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "*/README.md"]
exclude_patterns = [".*", "notebook/*"]
myst_heading_anchors = 4
default_role = "code"  # docstrings have names between single backticks
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
html_theme = "furo"
html_title = "tiermoe"
html_show_sourcelink = html_copy_source = False
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures need no page; links of text do

CHAPTERS = {
    "Use": [
        "docs/quickstart", "docs/which-model", "docs/families", "docs/server", "docs/troubleshooting",
    ],
    "Python": ["docs/api", "examples/README"],
    "Inside": ["docs/life-of-a-token", "docs/architecture", "docs/formats", "CONTRIBUTING", "training/README"],
    "Figures": [
        "docs/results", "docs/systems", "docs/papers", "docs/later-systems", "docs/research",
        "benchmarks/README", "data/README",
    ],
    "Changes": ["CHANGELOG"],
}  # fmt: skip


def chapters(app: Any, name: str, source: list[str]) -> None:
    """Gives README its chapters, which a forge would show as text."""
    if name == root_doc:
        source[0] += "".join(_chapter(caption, pages) for caption, pages in CHAPTERS.items())


def _chapter(caption: str, pages: list[str]) -> str:
    lines = "".join(f"/{page}\n" for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}```\n"


def setup(app: Any) -> None:
    app.connect("source-read", chapters)
