"""Pushes and pulls in the timeline: when they were, on the worker and on the server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab import kvstore
from hvdlab.collectives import context
from hvdlab.collectives.kvstore.servers.messages import RequestDone
from hvdlab.collectives.kvstore.servers.spans import ServerClock
from hvdlab.collectives.tracing.chrome_trace import SERVERS_PID
from hvdlab.collectives.tracing.recording import span_columns
from hvdlab.collectives.tracing.trace_file import load_trace as load_recording
from hvdlab.collectives.tracing.trace_file import save_recording
from hvdlab.runner.check_trace import check, load
from support.ranks.resident import Ranks

SIZE = 100_000
Event = dict[str, Any]


def test_the_clock_of_a_server_on_another_host_is_known_as_well_as_its_quickest_answer() -> None:
    ahead = 5_000_000_000
    clock = ServerClock(local=False)
    for asked, began, seen in ((1_000_000, 1_900_000, 2_000_000), (3_000_000, 3_004_000, 3_010_000)):
        found = clock.here(RequestDone(1, began=began + ahead, took=1000), asked, seen)
        assert abs(found - began) <= (seen - asked) // 2
    # The answer before this one was slow, and has no newer state than the known one.
    found = clock.here(RequestDone(1, began=4_100_000 + ahead, took=0), 4_000_000, 9_000_000)
    assert abs(found - 4_100_000) <= 5_000
    assert ServerClock(local=True).here(RequestDone(1, began=77), 1, 100) == 77


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    env = {"HVDLAB_KV_SERVERS": "2", "MXNET_KVSTORE_BIGARRAY_BOUND": "50000"}
    with Ranks(2, env=env) as started:
        started.run(start_servers)
        yield started


def start_servers() -> None:
    """Start the servers. They live as long as the ranks, so a fixture's have to come before its first test."""
    kvstore.create("dist_async")


def pushes(path: str) -> list[tuple[int, int]]:
    """Push and pull a key in parts on two servers; return when each call began and returned."""
    engine, seen = context.engine(), []
    if engine.rank == 0:
        engine.start_timeline(path, True)
    hvd.barrier(name="begin")
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(SIZE, np.float32))
    out = np.zeros(SIZE, np.float32)
    for _ in range(3):
        before = time.monotonic_ns()
        kv.pushpull("w", np.ones(SIZE, np.float32), out=out)
        seen.append((before, time.monotonic_ns()))
    hvd.barrier(name="end")
    if engine.rank == 0:
        engine.stop_timeline()
    return seen


def span_of(event: Event) -> tuple[int, int]:
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name and event["ph"] == "X"]


def test_a_push_is_on_its_worker_and_on_its_server_and_an_arrow_ties_both(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    seen = ranks.run(pushes, str(path))
    events = load(path.read_text())
    assert check(events) == []
    for kind in ("PUSH", "PULL"):
        own = [event for event in of(events, kind) if event["pid"] < SERVERS_PID]
        there = {
            (event["bind_id"], event["args"]["rank"]): event
            for event in of(events, kind)
            if event["pid"] >= SERVERS_PID
        }
        assert len(own) == len(there) == 2 * 3 * 2  # ranks, steps, servers
        for event in own:
            args, (begin, end) = event["args"], span_of(event)
            calls = [call for call in seen[event["pid"]] if call[0] <= begin and end <= call[1]]
            assert len(calls) == 1
            assert (args["tensor"], args["bytes"], args["dtype"]) == ("w", 4 * SIZE // 2, "float32")
            assert args["site"].startswith("test_store_timeline.py:")
            server = there[event["bind_id"], event["pid"]]
            assert server["pid"] == SERVERS_PID + args["server"]
            assert begin <= span_of(server)[0] <= span_of(server)[1] <= end
            assert server["args"]["version"] == args["version"]
            assert server["flow_in" if kind == "PUSH" else "flow_out"]
        # The next push was computed from the pulled values.
        pulled = {event["bind_id"] for event in own if kind == "PULL"}
        based = [
            event
            for event in of(events, "PUSH")
            if event.get("bind_id") in pulled and "rank" not in event["args"]
        ]
        assert kind == "PUSH" or len(based) == 2 * 2 * 2
    versions = sorted(
        event["args"]["version"] for event in of(events, "PUSH") if "staleness" in event["args"]
    )
    assert versions == sorted([*range(1, 7), *range(1, 7)])


def test_requests_of_a_saved_trace_come_back_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks.run(pushes, str(path))
    recording = load_recording(path)
    again = load(save_recording(recording, tmp_path / "again.json").read_text())
    assert check(again) == []

    def requests(events: list[Event]) -> list[Any]:
        found = [event for event in events if event["ph"] == "X" and event["cat"] == "stores"]
        plain = [{k: v for k, v in event.items() if k not in ("tid", "bind_id")} for event in found]
        return sorted(
            plain, key=lambda event: (event["pid"], event["ts"], event["args"]["store"], str(event))
        )

    assert requests(again) == requests(load(path.read_text()))
    table = span_columns(recording)
    push = table["kind"] == "push"
    assert push.sum() == 12
    assert (table["ranks"][push | (table["kind"] == "pull")] == 1).all()
    tied = [(event["pid"] >= SERVERS_PID, event["bind_id"]) for event in again if "bind_id" in event]
    assert len(tied) == len(requests(again)) == 2 * 2 * 12
    for number in {flow for _, flow in tied}:
        assert {on_server for on_server, flow in tied if flow == number} == {False, True}
