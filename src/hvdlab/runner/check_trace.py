"""Check a Chrome trace against the rules of its format: ``python -m hvdlab.runner.check_trace FILE``.

Viewers are lenient, and silently drop events that they don't understand. This program reports them instead.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdlab.collectives.text import visible

REQUIRED: dict[str, tuple[str, ...]] = {
    "X": ("name", "ts", "dur"),
    "B": ("name", "ts"),
    "E": ("ts",),
    "b": ("name", "cat", "ts"),
    "e": ("name", "cat", "ts"),
    "n": ("name", "cat", "ts"),
    "i": ("name", "ts", "s"),
    "C": ("name", "ts", "args"),
    "M": ("name", "args"),
}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
PROBLEMS_SHOWN = 50
"""Faults of one file that are printed at most."""
LONGEST_LINE = 1000
"""Characters of a printed line: names in a file may have any length."""

Event = dict[str, Any]
Track = tuple[int, int]


class TraceFormatError(ValueError):
    """Error of a file that can't be read as a trace at all."""


def load(text: str, *, killed: bool = False) -> list[Event]:
    """Return the events of a trace in either form of the format.

    With ``killed`` the closing bracket may be missing, and a last line that was cut off is left out. Raises
    :class:`TraceFormatError` when it isn't JSON or not a trace.
    """
    try:
        # Python's parser accepts NaN and Infinity, which are no JSON and which viewers refuse.
        data = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        if not killed:
            raise TraceFormatError(f"not JSON: {error}") from None
        data = _load_cut(text)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceFormatError("neither an array of events nor an object with traceEvents")
    return events


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _load_cut(text: str) -> Any:
    lines = text.rstrip().rstrip(",").split("\n")
    for used in (lines, lines[:-1]):
        try:
            return json.loads("\n".join(used).rstrip().rstrip(",") + "]", parse_constant=_no_constant)
        except ValueError:
            continue
    raise TraceFormatError("not JSON, not even without its last line")


def check(events: Sequence[Event], *, killed: bool = False) -> list[str]:
    """Return the faults of a trace, one sentence each; empty if it is good.

    With ``killed`` slices may be open at the end.
    """
    problems: list[str] = []
    sound: list[tuple[int, Event]] = []
    for index, event in enumerate(events):
        found = list(_check_event(event))
        problems += [f"event {index}: {problem}" for problem in found]
        if not found:
            sound.append((index, event))
    problems += _check_slices(sound, killed)
    problems += _check_async(sound, killed)
    problems += _check_names(sound)
    return problems


def _check_event(event: Event) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in REQUIRED:
        yield f"unknown phase type {phase!r}"
        return
    for key in ("pid", "tid"):
        # Not isinstance(), which accepts true and false as integers.
        if type(event.get(key)) is not int:
            yield f"{key} is {event.get(key)!r}, not an integer"
    for key in REQUIRED[phase]:
        if key not in event:
            yield f"{phase} has no {key}"
    for key in ("ts", "dur"):
        if key in event and not _is_finite(event[key]):
            yield f"{key} is {event[key]!r}, not a finite number"
        elif key in event and event[key] < 0:
            yield f"{key} is negative"
    if not isinstance(event.get("args", {}), dict):
        yield "args is not an object"
        return
    yield from _check_special(phase, event)


def _check_special(phase: str, event: Event) -> Iterator[str]:
    args = event.get("args", {})
    if phase in "ben" and len(_async_ids(event)) != 1:
        yield f"{phase} needs exactly one of id, id2.local and id2.global"
    if "bind_id" in event and (phase != "X" or not (event.get("flow_in") or event.get("flow_out"))):
        yield "an arrow needs a complete slice that it leads to or from"
    if phase == "C" and not (args and all(_is_finite(value) for value in args.values())):
        yield "a counter needs finite numbers"
    if phase == "i" and event.get("s") not in ("g", "p", "t"):
        yield f"scope {event.get('s')!r} is none of g, p, t"
    if phase == "M":
        key, kind = METADATA.get(event.get("name", ""), ("", object))
        if not key:
            yield f"unknown metadata {event.get('name')!r}"
        elif type(args.get(key)) is not kind:
            yield f"{event['name']} has no {key}"


def _async_ids(event: Event) -> list[str]:
    """Return the ids by which an async event is paired. ``id`` and ``id2.global`` count across processes."""
    ids = [f"global {event['id']}"] if isinstance(event.get("id"), str | int) else []
    both = event.get("id2", {})
    if isinstance(both, dict):
        ids += [f"global {both['global']}"] if "global" in both else []
        ids += [f"process {event.get('pid')} {both['local']}"] if "local" in both else []
    return ids


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nanos(micros: float) -> int:
    # As whole numbers: the sum of two fractions can differ in its last bit from the time that it stands
    # for, and slices would overlap.
    return round(micros * 1000)


def _check_slices(events: Sequence[tuple[int, Event]], killed: bool) -> Iterator[str]:
    """Yield the faults of slices: on each track begins and ends pair up, and slices are nested or apart."""
    tracks: dict[Track, list[tuple[int, int, int]]] = defaultdict(list)
    opened: dict[Track, list[tuple[int, int, str]]] = defaultdict(list)
    timed = ((_nanos(e["ts"]), index, e) for index, e in events if e["ph"] in "XBE")
    # At equal times the order in the file counts, as it does for viewers.
    for at, index, event in sorted(timed, key=lambda item: item[:2]):
        track = (event["pid"], event["tid"])
        if event["ph"] == "X":
            tracks[track].append((at, at + _nanos(event["dur"]), index))
        elif event["ph"] == "B":
            opened[track].append((at, index, event["name"]))
        elif not opened[track]:
            yield f"event {index}: E without B on {_track(track)}"
        else:
            begin, begin_index, name = opened[track].pop()
            tracks[track].append((begin, at, begin_index))
            if event.get("name", name) != name:
                yield f"event {index}: E of {event['name']!r} ends {name!r}"
    for track, left in () if killed else opened.items():
        for _, index, name in left:
            yield f"event {index}: B of {name!r} on {_track(track)} has no E"
    for track, slices in tracks.items():
        yield from _check_nesting(track, slices)


def _check_nesting(track: Track, slices: list[tuple[int, int, int]]) -> Iterator[str]:
    stack: list[tuple[int, int, int]] = []
    # Of slices that begin together the longest comes first, since it has to be the outermost.
    for begin, end, index in sorted(slices, key=lambda item: (item[0], -item[1])):
        while stack and stack[-1][1] <= begin:
            stack.pop()
        if stack and end > stack[-1][1]:
            yield f"event {index}: overlaps event {stack[-1][2]} on {_track(track)} without being inside it"
        stack.append((begin, end, index))


def _check_async(events: Sequence[tuple[int, Event]], killed: bool) -> Iterator[str]:
    """Yield the faults of async events: each ``b`` has one ``e`` of the same category, id and name that is not earlier."""
    opened: dict[tuple[str, str], list[tuple[int, Event]]] = defaultdict(list)
    for index, event in events:
        if event["ph"] not in "be":
            continue
        key = (event["cat"], _async_ids(event)[0])
        if event["ph"] == "b":
            opened[key].append((index, event))
            continue
        if not opened[key]:
            yield f"event {index}: e without b (category {key[0]!r}, id {key[1]})"
            continue
        _, begin = opened[key].pop()
        if begin["name"] != event["name"]:
            yield f"event {index}: e of {event['name']!r} ends {begin['name']!r}"
        if event["ts"] < begin["ts"]:
            yield f"event {index}: ends before it begins"
    for key, left in () if killed else opened.items():
        for index, _ in left:
            yield f"event {index}: b without e (category {key[0]!r}, id {key[1]})"


def _check_names(events: Sequence[tuple[int, Event]]) -> Iterator[str]:
    """Yield the faults of names: every process that has events has one."""
    metadata = [event for _, event in events if event["ph"] == "M"]
    processes = {event["pid"] for event in metadata if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in metadata if event["name"] == "thread_name"}
    for pid in sorted({event["pid"] for _, event in events} - processes):
        yield f"process {pid} has no process_name"
    used = {(event["pid"], event["tid"]) for _, event in events if event["ph"] in "XBE"}
    for track in sorted(used - threads):
        yield f"{_track(track)} has no thread_name"


def _track(track: Track) -> str:
    return f"process {track[0]} thread {track[1]}"


def main(arguments: Sequence[str]) -> int:
    """Check files and print their faults. Return 1 if there are any, 2 for a wrong call."""
    killed = "--killed" in arguments
    paths = [Path(argument) for argument in arguments if argument != "--killed"]
    if not paths:
        print("usage: python -m hvdlab.runner.check_trace [--killed] FILE...", file=sys.stderr)
        return 2
    bad = False
    for path in paths:
        try:
            events = load(path.read_text(encoding="utf-8"), killed=killed)
        except (OSError, ValueError) as error:
            print(visible(f"{path}: {error}", LONGEST_LINE))
            bad = True
            continue
        problems = check(events, killed=killed)
        bad = bad or bool(problems)
        print(visible(f"{path}: {len(events)} events, {len(problems)} problems"))
        for problem in problems[:PROBLEMS_SHOWN]:
            print(visible(f"  {problem}", LONGEST_LINE))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
