"""The tests that `make quick` selects for a change."""

from __future__ import annotations

import pytest

from quick import BUDGET, Selection, select

MODULES = [
    "tests/collectives/engine/test_hooks.py",
    "tests/collectives/engine/test_load.py",
    "tests/collectives/test_client.py",
    "tests/launch/test_mpi.py",
]


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ("collectives/engine/hooks.py", MODULES[:1]),
        ("collectives/engine/store.py", MODULES[:2]),
        ("collectives/client.py", MODULES[2:3]),
        ("collectives/planes/host.py", MODULES[:3]),
        ("src/hvdlab/launch/mpi.py", MODULES[3:]),
        ("src/hvdlab/torch/mpi_ops.py", []),
        ("tests/launch/test_mpi.py", MODULES[3:]),
        ("docs/README.md", []),
    ],
)
def test_a_module_selects_the_tests_that_mirror_it(changed: str, run: list[str]) -> None:
    assert set(select([changed], MODULES, {}).run) == set(run)


def test_unit_tests_alone_are_selected_where_they_have_a_folder() -> None:
    modules = ["tests/unit/launch/test_mpi.py", "tests/integration/launch/test_mpi.py"]
    assert select(["src/hvdlab/launch/mpi.py"], modules, {}).run == (modules[0],)


def test_tests_beyond_the_budget_are_left_out_but_not_those_that_changed() -> None:
    seconds = {"collectives/engine/test_load": BUDGET - 1, "collectives/engine/test_hooks": 2}
    assert select(["collectives/engine/store.py"], MODULES, seconds) == Selection(
        (MODULES[0],), (MODULES[1],)
    )
    assert select(["collectives/engine/store.py", MODULES[1]], MODULES, seconds) == Selection(
        (MODULES[1],), (MODULES[0],)
    )
