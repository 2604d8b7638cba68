"""The map of the house agrees with the imports in the sources."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

IMAGES = Path(__file__).parents[3] / "docs" / "images"


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", IMAGES / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_map_shows_the_imports_of_today(rooms: ModuleType) -> None:
    committed = (IMAGES / "rooms.svg").read_text(encoding="utf-8")
    assert committed == rooms.drawn(), "python docs/images/rooms.py draws it again"


def test_arrows_that_a_longer_way_stands_for_are_left_out(rooms: ModuleType) -> None:
    imports = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert rooms.shortest(imports) == [("a", "b"), ("b", "c")]


def test_a_circle_of_rooms_is_found(rooms: ModuleType) -> None:
    with pytest.raises(ValueError, match="circle: a → b → a"):
        rooms.shortest({"a": {"b"}, "b": {"a"}})
