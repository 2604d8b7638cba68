"""The texts that a newcomer meets: their length, and their links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
FRONT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / name for name in FRONT), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]
)
_LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)


def prose(text: str) -> str:
    """Return the text without its blocks of code."""
    return _FENCE.sub("", text)


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and images outside of code."""
    for match in _LINK.finditer(_CODE.sub("`", prose(text))):
        yield match[1] or match[2]


def anchor(heading: str) -> str:
    """Return the anchor that GitHub and MyST give to a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def markdown_of(path: Path) -> str:
    """Return a page's Markdown; for a notebook, that of its Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors(path: Path) -> set[str]:
    """Return all anchors of a page."""
    text = prose(markdown_of(path))
    found: dict[str, int] = {}
    result = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*$", text, re.MULTILINE):
        name = anchor(heading)
        seen = found.get(name, 0)
        found[name] = seen + 1
        result.add(f"{name}-{seen}" if seen else name)
    return result


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """Return the relative links of a page that lead nowhere, or out of the tree."""
    missing = []
    for target in links(markdown_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        goal = page.parent / unquote(name) if name else page
        here = goal.exists() and root in goal.resolve().parents
        if not here or (fragment and goal.suffix in (".md", ".ipynb") and fragment not in anchors(goal)):
            missing.append(target)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    assert anchor("An allreduce of 4 bytes, `two` ranks") == "an-allreduce-of-4-bytes-two-ranks"
    assert list(links("[a](x.md#y) `[b](z.md)` ![c](i.png)")) == ["x.md#y", "i.png"]
    (tmp_path / "page.md").write_text(
        "[gone](nowhere.md)\n# Title\n[there](#title) [not](#other) [out](../)\n"
    )
    assert broken(tmp_path / "page.md", tmp_path) == ["nowhere.md", "#other", "../"]


def test_the_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words <= 700, f"README.md has {words} words: move some to docs/"
