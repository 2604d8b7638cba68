"""A campaign's summary of its outcomes, and the page with its measurements."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Self

import psutil
import pytest

from chaos.figures import Outcome, markdown, rows, table
from chaos.pieces import names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmarks' modules can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    yield pages
    for name in ("pages", "recovery", "simulated_hours", "versus_peers"):
        sys.modules.pop(name, None)


def outcome(**more: object) -> Outcome:
    return Outcome(1, 0, "shm", "SIGKILL", "pack", 2, 1.0, **more)  # type: ignore[arg-type]  # passed through


def test_what_was_not_told_in_time_is_late() -> None:
    (row,) = rows([outcome(report=0.2), outcome(report=1.5), outcome(), outcome(report=0.4)])
    assert (row["count"], row["late"]) == (4, 2)
    assert row["report_s"] == {"median": 0.4, "worst": 1.5}


def test_each_trouble_counts_its_faults() -> None:
    (row,) = rows([outcome(hang="x", lost=["a", "b"]), outcome(leaks=["fd"], wrong=["y"])])
    assert [row[name] for name in ("hangs", "lost_memory", "leaks", "wrong")] == [1, 1, 1, 1]
    assert table([row]).splitlines()[-1].split() == ["all", "2", "2", "1", "1", "1", "1"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank 2 died: killed by SIGKILL", True),
        ("ranks 0,2,3: stopped", True),
        ("ranks 1-3 were interrupted", True),
        ("ranks 0,1 waited", False),
        ("rank 12 died", False),
        ("2 of them", False),
    ],
)
def test_a_rank_is_named_by_its_number(text: str, named: bool) -> None:
    assert names(text, 2) is named


@pytest.mark.parametrize(
    ("place", "file"),
    [
        ("chaos", "chaos.json"),
        ("ddp", "chaos_ddp.json"),
        ("watched_gloo_2", "chaos_watched_2.json"),
        ("watched_gloo_4", "chaos_watched_4.json"),
        ("elastic", "elastic.json"),
        ("elastic-hosts", "elastic_hosts.json"),
    ],
)
def test_the_page_has_the_figures_of_the_campaign(benchmarks: ModuleType, place: str, file: str) -> None:
    """A campaign that has no result file has no table either."""
    path = ROOT / "benchmarks/results" / file
    expected = markdown(json.loads(path.read_text())) if path.exists() else ""
    assert benchmarks.between(PAGE.read_text(), place) == expected


class Interrupted:
    """Campaign that is interrupted after its first trial."""

    started = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is left."""

    def play(self, count: int, first: int) -> Iterator[Outcome]:
        """Play one trial, in whose place a user presses Ctrl-C."""
        yield Outcome(1, first, "shm", "a rank raises", "amid", 1, 1.0, report=0.1)
        raise KeyboardInterrupt


def test_an_interrupted_campaign_keeps_its_outcomes(
    benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("chaos_benchmark", ROOT / "benchmarks" / "chaos.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script.PoolFaults, "start", lambda self, plane: Interrupted())
    monkeypatch.setattr(script.PoolFaults, "stop", lambda self, played: [])
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--json", str(file)])
    with pytest.raises(SystemExit, match="True"):
        script.main()
    found = json.loads(file.read_text())
    assert found["faults"] == 1
    assert found["pools"] == [{"plane": "shm", "pools": 1, "left_at_the_end": [], "interrupted": True}]


def test_the_page_has_the_figures_of_recovery(benchmarks: ModuleType) -> None:
    import recovery

    path = ROOT / "benchmarks/results/recovery.json"
    expected = recovery.markdown(json.loads(path.read_text())) if path.exists() else ""
    assert benchmarks.between((ROOT / "docs/reference/costs.md").read_text(), "recovery") == expected


def test_the_page_has_what_was_seen_of_the_peers(benchmarks: ModuleType) -> None:
    import versus_peers

    result = json.loads((ROOT / "benchmarks/results/versus_peers.json").read_text())
    assert benchmarks.between(PAGE.read_text(), "peers") == versus_peers.markdown(result)


def program(path: Path, text: str) -> Path:
    """Return an executable that stands in for a contender's interpreter."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_script_that_does_not_answer_is_ended_and_shown_as_one_that_hangs(
    benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import versus_peers

    pid = tmp_path / "pid"
    monkeypatch.setattr(
        versus_peers, "MONARCH", program(tmp_path / "hangs", f"echo $$ > {pid}; exec sleep 1000")
    )
    monkeypatch.setattr(
        sys,
        "executable",
        str(program(tmp_path / "answers", 'echo ready; while read n; do echo "[0.5]"; done')),
    )
    report = versus_peers.costs(2, 5)
    assert report["trouble"] == {"monarch": "hangs (ended after 5 s)"}
    assert not psutil.pid_exists(int(pid.read_text()))
    call = versus_peers.costs_table(report).splitlines()[3]
    assert call == "| an empty call of all ranks, ms | 500.00 | hangs (ended after 5 s) |"


def test_the_costs_are_those_that_the_scripts_answer(
    benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import versus_peers

    for name, seconds in (("hvdlab", 0.002), ("monarch", 0.001)):
        program(tmp_path / name, f'echo ready; while read n; do echo "[{seconds}, {seconds}]"; done')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "hvdlab"))
    monkeypatch.setattr(versus_peers, "MONARCH", tmp_path / "monarch")
    report = versus_peers.costs(2, 60)
    assert report["trouble"] == {}
    assert "| an empty call of all ranks, ms | 2.00 | 1.00 |" in versus_peers.costs_table(report)
    assert all(found["memory, MiB"] > 0 for found in report["medians"].values())


def test_a_script_that_fails_says_so(benchmarks: ModuleType, tmp_path: Path) -> None:
    import versus_peers

    with pytest.raises(RuntimeError, match="ended by itself with status 3"):
        versus_peers.CallScript(program(tmp_path / "fails", "exit 3"), "monarch", 60)


def test_monarch_names_a_rank_by_its_place_in_the_mesh(benchmarks: ModuleType) -> None:
    import versus_peers

    monarch = next(peer for peer in versus_peers.PEERS if peer.name == "monarch")
    assert versus_peers.names("The actor <root>.<Rank rank{'ranks': 1/4}> has failed", monarch)
    assert not versus_peers.names("The actor <root>.<Rank rank{'ranks': 2/4}> has failed", monarch)


def test_the_page_has_the_simulated_hours(benchmarks: ModuleType) -> None:
    import simulated_hours

    report = json.loads(simulated_hours.RESULTS.read_text())
    assert benchmarks.between(PAGE.read_text(), "simulated-hours") == simulated_hours.markdown(report)
