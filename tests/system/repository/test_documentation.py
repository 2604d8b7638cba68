"""The texts that a newcomer meets: their length, their links, and the targets and steps that they name."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
FRONT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / name for name in FRONT),
        *ROOT.glob("[a-z]*/README.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/tutorial/*.ipynb"),
    ]
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
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


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


def make_targets() -> tuple[set[str], set[str]]:
    """Return the targets that the Makefile declares, and those that ``make help`` lists."""
    text = (ROOT / "Makefile").read_text()
    declared = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert declared is not None
    done = subprocess.run(["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {name for line in done.stdout.splitlines() for name in line.split("  ")[0].split()}
    return set(declared[1].split()), listed


def test_make_help_lists_every_target() -> None:
    declared, listed = make_targets()
    assert listed == declared


def test_every_make_target_in_the_texts_exists() -> None:
    declared, _ = make_targets()
    named = {
        (name, page)
        for page in PAGES
        for name in re.findall(r"`make ([a-z][a-z-]*)", (ROOT / page).read_text(encoding="utf-8"))
    }
    assert sorted((name, page) for name, page in named if name not in declared) == []


def test_the_page_about_tests_has_each_step_of_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    steps = set(
        re.findall(r"\bmake ([a-z][a-z-]*)", re.sub(r"#.*|^\s*echo.*", "", script, flags=re.MULTILINE))
    )
    page = (ROOT / "docs" / "design" / "testing.md").read_text(encoding="utf-8")
    _, _, after = page.partition("## What CI runs\n")
    table = after.split("\n## ")[0]
    assert set(re.findall(r"^\| `make ([a-z-]+)`", table, re.MULTILINE)) == steps
