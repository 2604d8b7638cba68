"""The checker finds errors, and only those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdlab.runner.check_trace import TraceFormatError, check, load, main

Event = dict[str, Any]
NAMES: list[Event] = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "p"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}},
]


def event(phase: str, ts: float = 0, **more: Any) -> Event:
    return {"ph": phase, "name": "n", "pid": 1, "tid": 1, "ts": ts, **more}


def problems(*events: Event, killed: bool = False) -> list[str]:
    return check([*NAMES, *events], killed=killed)


GOOD: list[list[Event]] = [
    [],
    [event("X", 0, dur=10), event("X", 2, dur=3), event("X", 5, dur=5), event("X", 10, dur=0)],
    [event("X", 0.3, dur=0.1), event("X", 0.4, dur=0.1)],
    [event("B", 0), event("X", 1, dur=2), event("B", 3), event("E", 4), event("E", 4), event("B", 4), event("E", 4)],
    [event("b", 0, cat="c", id="1"), event("b", 1, cat="c", id="2"), event("e", 2, cat="c", id="1"), event("e", 9, cat="c", id="2")],
    [event("b", 0, cat="c", id2={"local": "0x1"}), event("e", 0, cat="c", id2={"local": "0x1"})],
    [event("i", 3, s="t"), event("C", 4, args={"value": 1.5})],
]  # fmt: skip


@pytest.mark.parametrize("events", GOOD)
def test_good_traces_have_no_problems(events: list[Event]) -> None:
    assert problems(*events) == []


BAD: dict[str, list[Event]] = {
    "unknown phase": [event("Z")],
    "has no dur": [event("X")],
    "dur is negative": [event("X", dur=-1)],
    "ts is negative": [event("i", -5, s="t")],
    "not a finite number": [event("X", float("nan"), dur=1)],
    "ts is '3'": [{**event("B"), "ts": "3"}],
    "ts is True": [event("B", True)],
    "pid is 'a'": [{**event("i", s="t"), "pid": "a"}],
    "tid is 1.5": [{**event("i", s="t"), "tid": 1.5}],
    "scope 'x'": [event("i", s="x")],
    "needs finite numbers": [event("C", args={"value": float("inf")})],
    "args is not an object": [event("X", dur=1, args=[])],
    "unknown metadata": [{"ph": "M", "name": "colour", "pid": 1, "tid": 1, "args": {}}],
    "process_sort_index has no sort_index": [
        {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": "1"}}
    ],
    "overlaps event 2": [event("X", 0, dur=10), event("X", 5, dur=10)],
    "overlaps event 3": [event("X", 5, dur=10), event("B", 0), event("E", 8)],
    "E without B": [event("E")],
    "has no E": [event("B")],
    "E of 'n' ends 'm'": [{**event("B"), "name": "m"}, event("E")],
    "b needs exactly one of": [event("b", cat="c")],
    "e needs exactly one of": [event("e", cat="c", id="1", id2={"local": "1"})],
    "b has no cat": [event("b", id="1")],
    "b without e": [event("b", cat="c", id="1"), event("e", cat="d", id="1")],
    "e without b": [event("e", cat="c", id2={"local": "1"})],
    "e of 'm' ends 'n'": [event("b", cat="c", id="1"), {**event("e", cat="c", id="1"), "name": "m"}],
    "ends before it begins": [event("b", 5, cat="c", id="1"), event("e", 4, cat="c", id="1")],
    "process 2 has no process_name": [{**event("i", s="t"), "pid": 2}],
    "process 1 thread 2 has no thread_name": [{**event("X", dur=1), "tid": 2}],
}


@pytest.mark.parametrize("problem", BAD)
def test_each_fault_is_found(problem: str) -> None:
    assert any(problem in found for found in problems(*BAD[problem])), problems(*BAD[problem])


def test_ids_of_one_process_do_not_pair_with_anothers() -> None:
    other = {**event("e", cat="c", id2={"local": "1"}), "pid": 2}
    assert len(problems(event("b", cat="c", id2={"local": "1"}), other)) == 3


def test_slices_may_be_open_in_the_trace_of_a_killed_process() -> None:
    assert problems(event("B"), event("b", cat="c", id="1"), killed=True) == []
    assert len(problems(event("E"), killed=True)) == 1


def test_both_forms_of_the_format_are_read() -> None:
    assert load(json.dumps(NAMES)) == load(json.dumps({"traceEvents": NAMES})) == NAMES


@pytest.mark.parametrize("text", ["", "{}", "3", "[3]", '[{"ph":', '[{"ts": NaN}]', '{"traceEvents": 1}'])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(TraceFormatError):
        load(text)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, cut = tmp_path / "good", tmp_path / "bad", tmp_path / "cut"
    good.write_text(json.dumps(NAMES))
    bad.write_text(json.dumps([*NAMES, event("E")]))
    cut.write_text(json.dumps(NAMES)[:-1])
    assert main([str(good)]) == 0
    assert main([str(good), str(bad)]) == 1
    assert "E without B" in capsys.readouterr().out
    assert main([str(cut)]) == 1
    assert main(["--killed", str(cut)]) == 0
    assert main([str(tmp_path / "missing")]) == 1
    assert main([]) == 2
