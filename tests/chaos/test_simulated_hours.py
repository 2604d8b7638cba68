"""The program that plays random schedules by the hour: its count of states, its pieces, and the faults that it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from support.simulation.joint_simulation import Simulation

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import simulated_hours

    yield simulated_hours
    for name in ("simulated_hours", "pages"):
        sys.modules.pop(name, None)


def sketch_of(hours: ModuleType, numbers: range) -> object:
    sketch = hours.StateSketch()
    for number in numbers:
        sketch.add(str(number).encode())
    return sketch


@pytest.mark.parametrize("count", [0, 1, 500, 30_000, 200_000])
def test_a_sketch_counts_distinct_states(hours: ModuleType, count: int) -> None:
    sketch = sketch_of(hours, range(count))
    sketch.unite(sketch_of(hours, range(count // 2)))  # type: ignore[attr-defined]  # a StateSketch
    again = hours.StateSketch.from_text(sketch.to_text())  # type: ignore[attr-defined]  # likewise
    assert again.count() == pytest.approx(count, rel=0.03)


def test_a_state_is_the_same_in_every_process() -> None:
    """Otherwise pieces would not add up: the hash of a text, and with it the order of a set, differs between processes."""
    program = "import simulated_hours as s; s.COUNTED = 1; print(s.play('elastic', 3, 8).registers, s.play('collectives', 0, 9).registers)"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT / "benchmarks",
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_states_that_differ_by_an_act_differ(hours: ModuleType) -> None:
    simulation = Simulation(3, 1)
    found = [hours.abstract_state(simulation)]
    acts: list[Callable[[], object]] = [
        lambda: simulation.kill(1),
        simulation.run,
        lambda: simulation.connect(1),
        lambda: simulation.cut(2),
        simulation.restart,
    ]
    for act in acts:
        act()
        found.append(hours.abstract_state(simulation))
    assert len(set(found)) == len(found)


def test_a_state_has_no_number_that_only_counts(hours: ModuleType) -> None:
    """A job in which each rank has been replaced, and all have submitted, is in the state of its begin again."""
    simulation = Simulation(2, 1, options=CoordinatorOptions(size=None))
    before = hours.abstract_state(simulation)
    for rank in (0, 1):
        simulation.kill(rank)
    simulation.run()
    for rank in (0, 1):
        simulation.connect(rank)
    simulation.run()
    for me in simulation.ranks:
        me.state.elastic = False
    assert hours.abstract_state(simulation) == before


def test_pieces_follow_each_other_and_are_not_played_twice(
    hours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "hours.json", tmp_path / "page.md"
    page.write_text("<!-- figures: simulated-hours -->\n<!-- end of simulated-hours -->\n")
    options = ["simulated_hours.py", "--kind", "collectives", "--jobs", "1", "--json", str(file)]

    def run(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", [*options, *more])
        code: int = hours.main()
        return code

    assert run("--count", "7") == 0
    assert run("--count", "5", "--page", str(page)) == 0
    report = json.loads(file.read_text())
    assert [(piece["seed"], piece["schedules"]) for piece in report["pieces"]] == [(0, 7), (7, 5)]
    whole = hours.play("collectives", 0, 12)
    assert report["states"]["collectives"] == whole.registers
    assert sum(piece["steps"] for piece in report["pieces"]) == whole.steps
    assert [piece["counted"] for piece in report["pieces"]] == [1, 1], "seeds 0 and 10"
    assert ", in 2 |" in page.read_text()
    assert "collectives: 0 to 11" in page.read_text()
    with pytest.raises(SystemExit):
        run("--seed", "11", "--count", "1")
    assert "were played before" in capsys.readouterr().err


def test_a_fault_is_reported_with_its_seed(hours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(hours.Schedule):  # type: ignore[name-defined, misc]  # a module that is imported late
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.seed = seed

        def check_empty(self) -> None:
            super().check_empty()
            assert self.seed != 4, "a rank waits for ever"

    monkeypatch.setitem(hours.KINDS, "collectives", Faulty)
    played = hours.play("collectives", 2, 6)
    assert list(played.failed) == ["4"]
    assert "a rank waits for ever" in played.failed["4"]
    piece = hours.PlayedPiece("collectives", 2, 1, "", "3.11")
    piece.add(played)
    report = {
        "cores": 2,
        "pieces": [vars(piece)],
        "states": {"collectives": played.registers},
    }
    assert "| 1 (seeds 4) |" in hours.markdown(report)
