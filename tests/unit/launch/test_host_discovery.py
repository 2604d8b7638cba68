"""Scripts, lists and objects that say which hosts there are."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.launch.host_discovery import (
    GONE_AFTER,
    LATE,
    QUIET,
    STEADY,
    WAVERS,
    Cooldown,
    FixedHosts,
    HostAsker,
    HostDiscovery,
    HostDiscoveryScript,
    HostEvent,
    HostFailed,
    HostNotice,
    HostsAsked,
    HostsChanged,
    HostsFound,
    HostSource,
    HostTable,
    HostTick,
    NotFound,
    as_host_source,
)
from support.patience import PATIENCE
from support.threads import asleep


def test_a_script_prints_hosts() -> None:
    script = HostDiscoveryScript("echo a:2; echo; echo '  b '; echo a:1; echo [::1]; echo [::2]:4", 3)
    assert script.find() == {"a": 3, "b": 3, "[::1]": 3, "[::2]": 4}
    assert HostDiscoveryScript("true").find() == {}
    assert HostDiscoveryScript("echo b").find() == {"b": 1}


def test_scripts_that_are_no_help(tmp_path: Path) -> None:
    for command, text in {
        "echo gone >&2; exit 3": "it failed with exit code 3: gone",
        "kill -9 $$": "it was killed by SIGKILL",
        "echo 'Error: no quota'": "which is no host",
        "echo -oProxyCommand=x": "which is no host",
        "echo a:0": "which is no host",
        "echo a,b": "which is no host",
        "/no/such/script": "it failed with exit code 127",
    }.items():
        with pytest.raises(StartError, match=text):
            HostDiscoveryScript(command).find()
    # Its background processes end with it.
    hangs = HostDiscoveryScript(
        f"(sleep 1000; touch {tmp_path}/late) & echo $! >{tmp_path}/pid; wait", within=0.5
    )
    with pytest.raises(StartError, match="did not end within"):
        hangs.find()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip(), "cwd").exists()
    with pytest.raises(InvalidRequestError, match="at least one slot"):
        HostDiscoveryScript("true", 0)


@pytest.mark.parametrize("command", ["echo a", "sleep 1000 >&- 2>&- & echo a"])
def test_script_is_reaped_only_after_its_group_is_killed(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    killpg, killed = os.killpg, list[int]()

    def recorded(group: int, number: int) -> None:
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # fails once it was reaped
        killed.append(group)
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", recorded)
    assert HostDiscoveryScript(command).find() == {"a": 1}
    assert len(killed) == 1


def test_a_script_that_cannot_be_run_is_refused_at_once(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    for command in (script, f"{script} --all"):
        with pytest.raises(InvalidRequestError, match=r"hosts\.sh, does not exist"):
            as_host_source(command)
    with pytest.raises(InvalidRequestError, match="is a folder"):
        as_host_source(tmp_path)
    script.write_text("#!/bin/sh\necho a:2\n")
    with pytest.raises(InvalidRequestError, match=r"is not executable; `chmod \+x"):
        as_host_source(script)
    assert as_host_source(f"sh {script}").find() == {"a": 2}
    assert as_host_source("/no/such/script || echo b").find() == {"b": 1}
    script.chmod(0o700)
    assert as_host_source(script).find() == {"a": 2}


def test_what_may_be_given_as_a_source() -> None:
    class Mine(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {"a": 1}

    class Ours(HostSource):
        def find(self) -> dict[str, int]:
            return {"a": 1}

    class Duck:
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {"a": 1}

    for source in (
        Mine(),
        Ours(),
        Duck(),
        lambda: {"a": 1},
        {"a": 1},
        ["a"],
        "echo a:1",
        FixedHosts({"a": 1}),
    ):
        assert as_host_source(source).find() == {"a": 1}
    assert as_host_source(["a", "b:1"], 4).find() == {"a": 4, "b": 1}
    for wrong in (3, None, [1], Duck, {"a": "two"}, {"a": True}, {"-x": 1}, ["a b"]):
        with pytest.raises(InvalidRequestError):
            as_host_source(wrong)
    for bare in (HostSource(), HostDiscovery()):
        with pytest.raises(NotImplementedError, match="override find"):
            bare.find()


def test_fixed_hosts_change_when_they_are_set() -> None:
    hosts = FixedHosts({"a": 2})
    hosts.set({"a": 2, "b": 1})
    assert hosts.find() == hosts.find_available_hosts_and_slots() == {"a": 2, "b": 1}


class QueuedAnswers:
    """Observer that puts everything into a queue."""

    def __init__(self, reports: queue.SimpleQueue[object]) -> None:
        self.found = self.failed = reports.put
        self._reports = reports

    def asked(self) -> None:
        self._reports.put("asked")


def test_an_asker_reports_and_stops() -> None:
    answers: list[object] = [
        {"a": 1},
        ValueError("boom"),
        StartError("it failed"),
        ["nonsense"],
        {"a": 0, "b": 2},
    ]
    over, reports = threading.Event(), queue.SimpleQueue[object]()

    class Answers(HostSource):
        def find(self) -> dict[str, int]:
            if not answers:
                over.wait(PATIENCE)  # hangs
            answer = answers.pop(0) if answers else {}
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[return-value]  # nonsense, too

    asker = HostAsker(Answers(), QueuedAnswers(reports), interval=0)
    got = [reports.get(timeout=PATIENCE) for _ in range(11)]
    assert got[::2] == ["asked"] * 6
    assert got[1::2] == [
        {"a": 1},
        "it raised ValueError: boom",
        "it failed",
        "it found ['nonsense'], which is not {host: slots}",
        {"b": 2},
    ]
    asker.close()  # does not wait for the source
    over.set()
    asker._thread.join(PATIENCE)
    assert reports.empty()
    assert issubclass(StartError, HvdlabError)


class LateEvent(threading.Event):
    """Event that is set only once another thread sleeps, which it starts first."""

    def __init__(self, other: threading.Thread) -> None:
        super().__init__()
        self._other = other

    def set(self) -> None:
        self._other.start()
        assert self._other.native_id is not None
        asleep(self._other.native_id)
        super().set()


def test_an_asker_that_is_closed_as_it_asks_does_not_wait_for_the_source() -> None:
    go, over, asked = threading.Event(), threading.Event(), threading.Event()

    class Slow(HostSource):
        def find(self) -> dict[str, int]:
            if not asked.is_set():
                asked.set()
                assert go.wait(PATIENCE)
            else:
                over.wait(PATIENCE)
            return {}

    asker = HostAsker(Slow(), QueuedAnswers(queue.SimpleQueue()), interval=0)
    assert asked.wait(PATIENCE)
    closer = threading.Thread(target=asker.close)
    asker._answering = LateEvent(closer)
    go.set()
    while closer.native_id is None:
        os.sched_yield()
    closer.join(PATIENCE / 2)
    closed = not closer.is_alive()
    over.set()
    closer.join(PATIENCE)
    asker._thread.join(PATIENCE)
    assert closed


class Followed:
    """Table whose answers are collected."""

    def __init__(self, cooldown: tuple[float, float] = (5, 20)) -> None:
        self.table = HostTable(cooldown, "the script")
        self.now = 0.0
        self.said: list[str] = []
        self.usable: dict[str, int] = {}
        self.aside: frozenset[str] = frozenset()

    def handle(self, event: HostEvent, after: float = 1.0) -> Followed:
        self.now += after
        for effect in self.table.handle(event, self.now):
            match effect:
                case HostNotice(text):
                    self.said.append(text)
                case HostsChanged(slots, aside):
                    assert (slots, aside) != (self.usable, self.aside)  # otherwise it is no news
                    assert not aside & slots.keys()
                    self.usable, self.aside = dict(slots), aside
        assert self.usable == self.table.usable
        return self


def test_hosts_are_used_at_once_and_given_up_when_missed_twice() -> None:
    seen = Followed().handle(HostsFound({"a": 2}))
    assert seen.usable == {"a": 2}
    assert seen.handle(HostsFound({"b": 1, "a": 2})).usable == {"a": 2, "b": 1}
    assert list(seen.usable) == ["a", "b"]  # the old ones first
    assert seen.handle(HostsFound({"b": 1})).usable == {"a": 2, "b": 1}
    assert seen.handle(HostsFound({"b": 1})).usable == {"b": 1}
    assert seen.handle(HostsFound({"b": 3})).usable == {"b": 3}
    assert seen.handle(HostsFound({"b": 2})).usable == {"b": 3}
    assert seen.handle(HostsFound({"b": 2})).usable == {"b": 2}
    assert seen.said == []


def test_a_host_that_fails_is_put_aside_longer_each_time_and_comes_back() -> None:
    seen = Followed((5, 20)).handle(HostsFound({"a": 1, "b": 1}))
    for seconds in (5, 10, 20, 20):
        seen.handle(HostFailed("b", "it refused")).handle(HostFailed("b", "it refused"), 0)
        assert seen.usable == {"a": 1}
        assert seen.aside == {"b"}
        assert seen.said.pop() == f"b is put aside for {seconds} s: it refused"
        assert not seen.said
        due = seen.table.deadline
        assert due == seen.now + seconds
        seen.handle(HostTick(), seconds - 0.1)
        assert seen.usable == {"a": 1}
        seen.handle(HostTick(), 0.1)
        assert seen.usable == {"a": 1, "b": 1}
        assert seen.said.pop() == "b is tried again"
        assert seen.table.deadline is None


def test_a_host_that_is_gone_when_its_cooldown_ends_is_not_used() -> None:
    seen = Followed().handle(HostsFound({"a": 1, "b": 1})).handle(HostFailed("b", "it was lost"))
    for _ in range(GONE_AFTER):
        seen.handle(HostsFound({"a": 1}))
    seen.handle(HostTick(), 100)
    assert seen.usable == {"a": 1}
    assert seen.said == ["b is put aside for 5 s: it was lost"]
    assert seen.handle(HostFailed("unknown", "?")).usable == {"a": 1}


@pytest.mark.parametrize("bad", [NotFound("it failed"), HostsFound({})])
def test_one_bad_answer_takes_no_host_away(bad: HostEvent) -> None:
    seen = Followed().handle(HostsFound({"a": 1})).handle(bad).handle(HostsFound({"a": 1}))
    assert seen.usable == {"a": 1}


def test_a_source_that_fails_is_reported_once() -> None:
    seen = Followed().handle(NotFound("it failed with exit code 1"))
    assert seen.said == ["the script is no help: it failed with exit code 1; it is asked again"]
    seen.handle(HostsFound({"a": 1}))
    for _ in range(20):
        seen.handle(NotFound("it failed")).handle(HostsFound({"a": 1}))
    assert len(seen.said) == 1
    seen.handle(HostsFound({"a": 1}), QUIET).handle(NotFound("it failed again"))
    assert seen.said[1:] == ["the script is no help: it failed again; the hosts that it found before stay"]
    assert seen.usable == {"a": 1}


def test_a_source_that_hangs_is_reported_once() -> None:
    seen = Followed().handle(HostsFound({"a": 1})).handle(HostsAsked())
    assert seen.table.deadline == seen.now + LATE
    seen.handle(HostTick(), LATE - 0.1)
    assert not seen.said
    seen.handle(HostTick(), 0.1).handle(HostTick(), LATE)
    assert seen.said == [
        "the script is no help: it has not answered for 15 s; the hosts that it found before stay"
    ]
    assert seen.table.deadline is None
    assert seen.usable == {"a": 1}


def test_a_source_that_changes_its_mind_is_not_followed() -> None:
    seen = Followed().handle(HostsFound({"a": 1}))
    changes = 0
    for number in range(40):
        before = dict(seen.usable)
        seen.handle(HostsFound({"a": 1, "b": 1} if number // 2 % 2 else {"a": 1}))
        changes += before != seen.usable
    assert changes <= WAVERS
    (text,) = seen.said
    assert text.startswith("the script changes its mind about b again and again")
    for _ in range(int(STEADY) + 1):
        seen.handle(HostsFound({"a": 1, "b": 1}))
    assert seen.usable == {"a": 1, "b": 1}


def test_a_range_of_seconds() -> None:
    for shortest, longest in ((0, 1), (-1, 5), (3, 2)):
        with pytest.raises(InvalidRequestError, match="two numbers of seconds"):
            Cooldown(shortest, longest)
        with pytest.raises(InvalidRequestError):
            HostTable((shortest, longest))


NAMES = ("a", "b", "c")
EVENTS = st.one_of(
    st.builds(HostsFound, st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3))),
    st.builds(HostFailed, st.sampled_from(NAMES), st.just("it was lost")),
    st.just(NotFound("it failed")),
    st.just(HostsAsked()),
    st.just(HostTick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from((0.0, 0.5, 1.0, 7.0, 40.0))), max_size=40))
def test_any_schedule(schedule: Sequence[tuple[HostEvent, float]]) -> None:
    """Only hosts that were found are used, never those put aside; and a steady source is followed in the end."""
    seen = Followed((5, 20))
    found: dict[str, set[int]] = {name: set() for name in NAMES}
    aside: dict[str, float] = {}
    for event, after in schedule:
        before = dict(seen.usable)
        seen.handle(event, after)
        if isinstance(event, HostsFound):
            for name, slots in event.slots.items():
                found[name].add(slots)
        if isinstance(event, HostFailed) and event.host in before:
            aside[event.host] = seen.now + 5  # or more, if it is not the first time
        assert all(slots in found[name] for name, slots in seen.usable.items())
        assert not [name for name in seen.usable if aside.get(name, -1.0) > seen.now]
        assert (
            seen.table.deadline is None or seen.table.deadline >= seen.now or not isinstance(event, HostTick)
        )
    for _ in range(25):  # longer than any cooldown, or doubt
        seen.handle(HostsFound({"a": 2, "c": 1}))
    assert seen.usable == {"a": 2, "c": 1}
