"""Guards of the tree's text. Each has the exceptions that there are today in `data/house.json`: lists that may only shrink."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from support.house import House

ROOT = Path(__file__).parents[3]
LISTS = ROOT / "tests" / "data" / "house.json"


@pytest.fixture(scope="module")
def house() -> House:
    return House.read()


def compare(kind: str, found: set[str], advice: str) -> None:
    """Fail where there is an exception that is not listed, or a listed one that is there no more."""
    listed = set(json.loads(LISTS.read_text())[kind])
    assert found - listed == set(), advice
    assert listed - found == set(), f"gone, take them off the list {kind} in tests/data/house.json"


def test_a_public_class_name_has_one_meaning(house: House) -> None:
    compare(
        "ambiguous class names",
        set(house.ambiguous_classes()),
        "another public class has this name already: choose one that says which of both it is",
    )


def test_modules_import_each_other_in_no_circle(house: House) -> None:
    compare(
        "modules in import circles",
        {name for circle in house.circles() for name in circle},
        "these modules import each other, also inside functions or for types: let one of them know less",
    )


def test_a_small_module_has_more_importers_than_its_neighbour(house: House) -> None:
    compare(
        "modules that only a neighbour imports",
        set(house.single_importers()),
        "only one module in the same folder imports this small one: let it stand there",
    )


def test_constructors_get_objects_and_no_bare_callables(house: House) -> None:
    compare(
        "bare callables among constructors' parameters",
        set(house.bare_callables()),
        "a reader can't follow the call to the function: pass the object whose method is meant, or a small protocol",
    )


def test_mypy_ignores_the_errors_of_no_module() -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    assert [one["module"] for one in overrides if one.get("ignore_errors")] == [], "mend the types"


def test_the_lists_are_sorted() -> None:
    for kind, names in json.loads(LISTS.read_text()).items():
        assert names == sorted(set(names)), kind


def test_imports_in_functions_and_for_types_close_circles(tmp_path: Path) -> None:
    package = tmp_path / "src" / "hvdlab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def go() -> None:\n    from hvdlab import two\n")
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hvdlab.one import go\n"
    )
    (package / "three.py").write_text("import hvdlab.one\n")
    house = House.read(tmp_path)
    assert house.circles() == [["one", "two"]]
    assert house.single_importers() == {"two": "one"}


def test_class_names_are_counted_over_all_rooms(tmp_path: Path) -> None:
    for folder in ("collectives", "src/hvdlab/torch"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "parts.py").write_text("class Part: ...\nclass _Own: ...\n")
    assert House.read(tmp_path).ambiguous_classes() == {"Part": ["collectives.parts", "torch.parts"]}


def test_callables_with_a_name_for_their_type_are_counted(tmp_path: Path) -> None:
    package = tmp_path / "src" / "hvdlab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(
        "Send = Callable[[int], None]\nclass Sender:\n    def __init__(self, send: Send, size: int) -> None: ...\n"
    )
    (package / "two.py").write_text(
        "from hvdlab.one import Send\nclass Feed:\n    def __init__(self, *, send: Send | None = None) -> None: ...\n"
    )
    assert House.read(tmp_path).bare_callables() == ["one.Sender.send", "two.Feed.send"]
