"""The walks through the code, and the glossary, name files and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DESIGN = ROOT / "docs" / "design"
GLOSSARY = (DESIGN / "glossary.md").read_text(encoding="utf-8")
WALKS = (DESIGN / "walks.md").read_text(encoding="utf-8") + GLOSSARY
STEP = re.compile(r"`([\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?")
"""A file, and after a colon the functions or classes that are meant in it."""


def steps() -> list[tuple[str, str]]:
    found = []
    for file, names in STEP.findall(WALKS):
        found += [(file, name) for name in re.findall(r"`(\w+)`", names)] or [(file, "")]
    return sorted(set(found))


def test_there_are_walks() -> None:
    assert len(steps()) > 60


@pytest.mark.parametrize(("file", "name"), steps())
def test_a_step_names_what_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not name or re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE)


def test_the_glossary_has_each_word_once_and_says_where_it_is_at_home() -> None:
    rows = re.findall(r"^\| (?!word|---)(.+?) \| (.+?) \| (.*?) \|$", GLOSSARY, re.MULTILINE)
    words = [word for word, _, _ in rows]
    assert len(words) == len(set(words)) > 40
    assert not [word for word, _, file in rows if not STEP.search(file)]


def test_no_step_names_a_directory_that_is_gone() -> None:
    for directory in re.findall(r"`([\w/]+)/`", WALKS):
        assert (ROOT / directory).is_dir()
