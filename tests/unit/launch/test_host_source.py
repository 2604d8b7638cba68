"""Scripts, lists and objects that say which hosts there are."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

import pytest

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.launch.host_source import (
    FixedHosts,
    HostAsker,
    HostDiscovery,
    HostDiscoveryScript,
    HostSource,
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

    for given in (
        Mine(),
        Ours(),
        Duck(),
        lambda: {"a": 1},
        {"a": 1},
        ["a"],
        "echo a:1",
        FixedHosts({"a": 1}),
    ):
        assert as_host_source(given).find() == {"a": 1}
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
