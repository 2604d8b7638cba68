"""An agent of a host, and a zygote's answers, with orders and answers that make no sense."""

from __future__ import annotations

import errno
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from hvdlab.collectives.protocol.codec import FrameDecoder, encode_frame
from hvdlab.launch.host_agent import wire, zygote_process
from hvdlab.launch.host_agent.agent import BACKLOG, Agent
from hvdlab.launch.host_agent.connection import agent_command
from hvdlab.launch.host_agent.rank_process import Child, spawn
from hvdlab.launch.host_agent.zygote import LARGEST, Zygote
from hvdlab.launch.host_agent.zygote_process import DESCRIPTORS
from support.effort import examples
from support.fuzz.protocol import make, run, spoil
from support.patience import PATIENCE

SLEEPS = wire.Start((b"sleep", b"1000"), b"/", {})


class Ordered:
    """Agent in a process of its own, whose reports are read one by one."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                agent_command(sys.executable), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
        self._decoder = FrameDecoder()
        self._reports: list[wire.FromAgent] = []
        self._greeted = b""

    def order(self, *orders: wire.AgentMessage) -> None:
        self.write(b"".join(map(wire.encode, orders)))

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def report(self) -> wire.FromAgent:
        """Return the next report. Fails once the agent has ended."""
        assert self.process.stdout is not None
        while not self._reports:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, self.errors.read_text()
            if self._greeted != wire.GREETING:
                self._greeted += data[: len(wire.GREETING)]
                data = data[len(wire.GREETING) :]
            self._reports += map(wire.decode_from_agent, self._decoder.feed(data) if data else ())
        return self._reports.pop(0)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Ordered]:
    made = Ordered(tmp_path / "errors")
    yield made
    made.close()


def ends(agent: Ordered, rank: int) -> None:
    """Fail unless the rank runs, and is reported when it is killed."""
    agent.order(wire.SignalRanks((rank,), signal.SIGKILL))
    # Ranks of random orders may still write and end.
    while getattr(report := agent.report(), "rank", rank) != rank:
        pass
    assert isinstance(report, wire.RankExited)
    assert (report.rank, report.signal) == (rank, signal.SIGKILL)


def test_an_order_that_cannot_be_read_is_reported_and_the_ranks_live(agent: Ordered) -> None:
    agent.order(SLEEPS, wire.Spawn((wire.RankSpec(0, {}),)))
    assert isinstance(agent.report(), wire.RankStarted)
    agent.write(encode_frame(b"\xc1"))
    report = agent.report()
    assert isinstance(report, wire.OrderFailed)
    assert report.unread
    ends(agent, 0)


def test_ranks_whose_host_cannot_be_prepared_are_reported_with_the_reason(agent: Ordered) -> None:
    agent.order(wire.Start((b"true",), b"/", {b"a=b": b"c"}), wire.Spawn((wire.RankSpec(3, {}),)))
    report = agent.report()
    assert isinstance(report, wire.RankNotStarted)
    assert report.rank == 3
    assert "its host could not be prepared" in report.text


def test_one_rank_that_cannot_be_started_leaves_the_others(agent: Ordered) -> None:
    agent.order(SLEEPS, wire.Spawn((wire.RankSpec(0, {"a": "\0"}), wire.RankSpec(1, {}))))
    first, second = agent.report(), agent.report()
    assert isinstance(first, wire.RankNotStarted)
    assert "null" in first.text
    assert isinstance(second, wire.RankStarted)
    ends(agent, 1)


def test_a_command_that_does_not_exist_and_is_not_utf8_is_reported(agent: Ordered) -> None:
    agent.order(wire.Start((b"/no\xff",), b"/", {}), wire.Spawn((wire.RankSpec(0, {}),)))
    report = agent.report()
    assert isinstance(report, wire.RankNotStarted)
    assert (report.code, report.text) == (127, "`/no\\xff` can't be run: No such file or directory")


def test_a_rank_that_runs_is_not_started_again(agent: Ordered) -> None:
    spawn = wire.Spawn((wire.RankSpec(0, {}),))
    agent.order(SLEEPS, spawn, spawn)
    assert isinstance(agent.report(), wire.RankStarted)
    assert agent.report() == wire.OrderFailed("rank 0 was ordered again while it runs", unread=False)
    ends(agent, 0)


def test_a_signal_that_does_not_exist_is_reported(agent: Ordered) -> None:
    agent.order(SLEEPS, wire.Spawn((wire.RankSpec(0, {}),)), wire.SignalRanks((0,), 1 << 40))
    assert isinstance(agent.report(), wire.RankStarted)
    assert isinstance(agent.report(), wire.OrderFailed)
    ends(agent, 0)


def test_what_is_no_frame_ends_the_agent_with_a_line(agent: Ordered) -> None:
    agent.write(b"\xff" * 8)
    assert agent.process.wait(PATIENCE) == 0
    assert "the launcher sent something else than orders" in agent.errors.read_text()


def test_agent_that_held_output_up_keeps_ranks_started_meanwhile(agent: Ordered) -> None:
    agent.order(SLEEPS, wire.Spawn((wire.RankSpec(0, {}),)))
    # Refusals that nothing reads fill the backlog. The order after them is longer than one read of the agent, which
    # so holds its ranks up before it reads the last order.
    no_signal = 1 << 40
    too_many = tuple(range(BACKLOG // 4))
    agent.order(wire.SignalRanks(too_many, no_signal), wire.SignalRanks(too_many, no_signal))
    agent.order(wire.Spawn((wire.RankSpec(1, {}),)))
    assert isinstance(agent.report(), wire.RankStarted)
    assert isinstance(agent.report(), wire.OrderFailed)
    assert isinstance(agent.report(), wire.OrderFailed)
    assert isinstance(agent.report(), wire.RankStarted)
    ends(agent, 0)
    ends(agent, 1)


def test_output_that_is_due_as_the_rank_is_reaped_is_not_read_from_its_closed_pipe() -> None:
    # A process that left the group keeps the pipe open. Its output and the rank's end become known in one round.
    command = b"(setsid sh -c 'trap : TERM; echo $$; sleep 1000') & wait"
    orders, reports = os.pipe(), os.pipe()
    agent = Agent(orders[0], reports[1], -1)
    child = spawn(wire.Start((b"sh", b"-c", command), b"/", {}), wire.RankSpec(0, {}), -1)
    pipes = list(child.pipes)
    agent._watch(child)
    line = b""
    while not line.endswith(b"\n"):
        select.select(pipes[:1], [], [], PATIENCE)
        line = os.read(pipes[0], 100)
    escaped = int(line)
    try:
        child.signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        agent._reap_children()
        for pipe in pipes:
            assert not agent._read_output(child, pipe)
    finally:
        os.kill(escaped, signal.SIGKILL)
        agent._selector.close()
        for descriptor in (*orders, *reports):
            os.close(descriptor)


def test_whatever_is_ordered_the_agent_reports_and_goes_on(agent: Ordered) -> None:
    def one(chance: random.Random) -> None:
        order: Any = make(chance.choice(get_args(wire.ToAgent)), chance, tame=chance.random() < 0.5)
        if isinstance(order, wire.Start):  # no fork server and no zygote: these are processes for seconds
            order = wire.Start(
                order.command, order.directory, order.environment, interfaces=order.interfaces,
                coordinator=chance.choice(("", "tls:a")), stdin_rank=order.stdin_rank, threads=order.threads,
            )  # fmt: skip
        payload = wire.encode_payload(order)
        agent.write(encode_frame((spoil(payload, chance) if chance.random() < 0.2 else payload) or b"\0"))

    run(one, examples(300))
    agent.order(SLEEPS, wire.Spawn((wire.RankSpec(1 << 30, {}),)))
    while not (isinstance(report := agent.report(), wire.RankStarted) and report.rank == 1 << 30):
        pass
    ends(agent, 1 << 30)


# -- the answers of a zygote ------------------------------------------------------------------------------------------


class Answers:
    """Zygote of which the test sends the answers; its process only waits to be killed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        interpreter = directory / "python3"
        interpreter.write_text("#!/bin/sh\nexec sleep 1000\n")
        interpreter.chmod(0o700)
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock = pair[1].dup()
        self.agents_end = pair[0]
        with monkeypatch.context() as patch:
            patch.setattr("hvdlab.launch.host_agent.zygote.socket.socketpair", lambda *_: pair)
            self.zygote = Zygote(
                wire.Start((os.fsencode(interpreter), b"-c", b"pass"), b"/", {}, preload=("json",))
            )

    def close(self) -> None:
        self.zygote.close()
        self.sock.close()


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    made = Answers(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize(
    "answer",
    [
        wire.RankStarted(7, 4000),
        wire.RankNotStarted(7, 1, "no"),
        wire.RankStarted(0, 0),
        wire.RankStarted(0, 1 << 40),
        None,
    ],
    ids=str,
)
def test_a_zygote_that_answers_nonsense_is_killed_and_its_ranks_are_left_to_the_agent(
    answers: Answers, answer: wire.AgentMessage | None
) -> None:
    answers.zygote.fork(wire.RankSpec(0, {}), -1)
    answers.sock.send(wire.encode_payload(wire.Preloaded({})))
    answers.sock.send(b"\xc1" if answer is None else wire.encode_payload(answer))
    assert answers.zygote.receive() == [wire.Preloaded({})]
    assert answers.zygote.receive() is None
    assert "killed because it sent not " in answers.zygote.why_ended()
    ((spec, stdin),) = answers.zygote.unborn()
    os.close(stdin)
    assert spec.rank == 0


def test_end_of_a_zygote_that_two_events_of_a_round_show_is_handled_once(
    answers: Answers, capfd: pytest.CaptureFixture[str]
) -> None:
    orders, reports = os.pipe(), os.pipe()
    agent = Agent(orders[0], reports[1], -1)
    agent._start, agent._zygote = SLEEPS, answers.zygote
    answers.zygote.fork(wire.RankSpec(0, {}), -1)
    os.kill(answers.zygote.pid, signal.SIGKILL)
    os.waitid(os.P_PID, answers.zygote.pid, os.WEXITED | os.WNOWAIT)
    agent._reap_children()  # the signal came first
    child = agent._children[0]
    # Numbers of descriptors are reused at once: the rank's next pipe can have that of the closed connection.
    os.dup2(pipe := next(iter(child.pipes)), answers.zygote.descriptor)
    agent._selector.register(answers.zygote.descriptor, selectors.EVENT_READ)
    try:
        agent._hear_zygote(answers.zygote)  # then its connection
        assert {pipe, answers.zygote.descriptor} <= agent._selector.get_map().keys()
        assert capfd.readouterr().err.count("ranks start without preloaded modules") == 1
    finally:
        child.signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        agent._reap_children()
        os.close(answers.zygote.descriptor)
        agent._selector.close()
        for descriptor in (*orders, *reports):
            os.close(descriptor)


def test_zygote_with_a_full_socket_gets_the_other_orders_later(answers: Answers) -> None:
    # The system makes it the least that there is, which some orders fill.
    answers.agents_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    answers.sock.setblocking(False)
    ranks = range(30)
    for rank in ranks:
        answers.zygote.fork(wire.RankSpec(rank, {}), -1)
    answers.sock.send(wire.encode_payload(wire.Preloaded({})))
    assert answers.zygote.receive() == [wire.Preloaded({})]
    for rank in ranks:
        data, descriptors, _, _ = socket.recv_fds(answers.sock, LARGEST, DESCRIPTORS)
        for descriptor in descriptors:
            os.close(descriptor)
        assert [spec.rank for spec in wire.decode_to_zygote(data).ranks] == [rank]
        answer = wire.RankNotStarted(rank, 1, "no")
        answers.sock.send(wire.encode_payload(answer))
        assert answers.zygote.receive() == [answer]


def test_whatever_a_zygote_answers_only_ordered_ranks_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(chance: random.Random) -> None:
        made = Answers(tmp_path, monkeypatch)
        try:
            for rank in range(3):
                made.zygote.fork(wire.RankSpec(rank, {}), -1)
            for _ in range(chance.randint(1, 6)):
                kind = chance.choice(get_args(wire.FromZygote))
                payload = wire.encode_payload(make(kind, chance, tame=chance.random() < 0.8))
                made.sock.send((spoil(payload, chance) if chance.random() < 0.2 else payload) or b"\0")
            for answer in made.zygote.receive() or ():
                assert isinstance(answer, wire.Preloaded) or answer.rank in range(3)
                if isinstance(answer, Child):
                    for descriptor in answer.pipes:
                        os.close(descriptor)
        finally:
            made.close()

    run(one, examples(60))


@pytest.mark.parametrize("call", ["fork", "pipe2"])
def test_a_zygote_that_cannot_fork_answers_and_goes_on(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert not zygote_process._fork(theirs, 3)
        answer = wire.decode_from_zygote(ours.recv(LARGEST))
    assert isinstance(answer, wire.RankNotStarted)
    assert answer.rank == 3
    assert "it could not be forked: Too many open files" in answer.text


@pytest.mark.parametrize("forked", [False, True], ids=["before the fork", "after the fork"])
def test_zygote_goes_on_when_the_process_in_the_middle_is_killed(
    monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    fork, calls = os.fork, 0

    def killed() -> int:
        nonlocal calls
        calls += 1
        pid = fork()
        if (calls == 2 and pid > 0) if forked else pid == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    lived, tell = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(lived, "rb") as file, monkeypatch.context() as patch:
        patch.setattr(os, "fork", killed)
        if zygote_process._fork(theirs, 3):
            os.write(tell, b"a rank that the agent does not know")
            os._exit(0)
        os.close(tell)
        answer = wire.decode_from_zygote(ours.recv(LARGEST))
        assert file.read() == b""  # at the end of a rank that was forked
    assert isinstance(answer, wire.RankNotStarted)
    assert "it could not be forked: its parent ended, killed by SIGKILL" in answer.text
