"""The tests that `make quick` selects for a change."""

from __future__ import annotations

import pytest

from support.quick import BUDGET, Selection, select

MODULES = [
    "tests/unit/collectives/engine/test_handles.py",
    "tests/unit/collectives/engine/test_store.py",
    "tests/unit/collectives/test_state.py",
    "tests/unit/launch/test_mpi_starter.py",
]


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ("collectives/engine/handles.py", MODULES[:1]),
        ("collectives/engine/other.py", MODULES[:2]),
        ("collectives/state.py", MODULES[2:3]),
        ("collectives/planes/host.py", MODULES[:3]),
        ("src/hvdlab/launch/mpi.py", MODULES[3:]),
        ("src/hvdlab/torch/mpi_ops.py", []),
        (MODULES[3], MODULES[3:]),
        ("docs/README.md", []),
    ],
)
def test_changed_module_selects_the_tests_that_mirror_it(changed: str, run: list[str]) -> None:
    assert set(select([changed], MODULES, {}).run) == set(run)


@pytest.mark.parametrize(("base", "run"), [("tests", 1), ("tests/unit", 0)])
def test_other_folders_mirror_modules_only_where_there_are_no_unit_tests(base: str, run: int) -> None:
    modules = [f"{base}/other/test_it.py", "tests/launch/test_starter.py"]
    assert len(select(["src/hvdlab/launch/starter.py"], modules, {}).run) == run


def test_tests_beyond_the_budget_are_left_out_but_not_those_that_changed() -> None:
    seconds = {
        "unit/collectives/engine/test_store": BUDGET - 1,
        "unit/collectives/engine/test_handles": 2,
    }
    changed = "collectives/engine/other.py"
    assert select([changed], MODULES, seconds) == Selection((MODULES[0],), (MODULES[1],))
    assert select([changed, MODULES[1]], MODULES, seconds) == Selection((MODULES[1],), (MODULES[0],))
