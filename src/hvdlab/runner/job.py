"""Runs a job: coordinator, agents, output and signals around the :class:`~hvdlab.runner.supervisor.Supervisor`."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import defaultdict
from collections.abc import Callable

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.environment import World, free_port
from hvdlab.collectives.errors import ProtocolError
from hvdlab.launch.environment import default_python
from hvdlab.launch.exec_agent import wire
from hvdlab.launch.exec_agent.child import STDERR
from hvdlab.launch.exec_agent.link import AgentLink
from hvdlab.runner import events as e
from hvdlab.runner.done import Done
from hvdlab.runner.keeper import Keeper
from hvdlab.runner.lines import Tail
from hvdlab.runner.news import News
from hvdlab.runner.outcomes import Outcome
from hvdlab.runner.plan import Job, own_address, rank_spec, start_message
from hvdlab.runner.report import failure_lines
from hvdlab.runner.sinks import Sink
from hvdlab.runner.supervisor import Supervisor

_CLOSING = 5.0
"""Seconds that agents and coordinator are given to end."""


class JobRun:
    """One run of a job. Call :meth:`run` once.

    Args:
        job: What to run.
        sink: Takes the ranks' output.
        say: Takes the launcher's own lines.
        verbose: Say also how it is started.
    """

    def __init__(self, job: Job, sink: Sink, say: Callable[[str], None], *, verbose: bool = False) -> None:
        self._job, self._sink, self._say = job, sink, say
        self._verbose = verbose
        self._supervisor = Supervisor(job.policy(), time.monotonic())
        self._done = Done()
        self._finished = False
        self._tails: defaultdict[int, Tail] = defaultdict(Tail)
        self._results: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._links: list[AgentLink] = []
        self._link_of: dict[int, AgentLink] = {}
        self._news = News()
        self._world: World | None = None
        self._client: Client | None = None

    def run(self) -> Done:
        """Run it to its end.

        Raises:
            StartError, InvalidRequestError: It could not be begun.
        """
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._news.close)
            cleanup.enter_context(self._news.signals())
            cleanup.callback(self._close_links)
            address = own_address(self._job)
            self._start_agents()
            environ = {**os.environ, **self._job.environment}
            coordinator = CoordinatorProcess.start(
                size=self._job.size, tcp_host=address, keep=True, environ=environ
            )
            try:
                self._client = Client.connect(coordinator.address, coordinator.token)
            except BaseException:
                coordinator.close()
                raise
            keeper = Keeper(coordinator, self._client, self._news.post, self._news.coordinator_lost)
            cleanup.callback(keeper.close)
            cleanup.callback(coordinator.close, _CLOSING)
            cleanup.callback(self._client.close)
            self._world = self._make_world(coordinator, address)
            self._news.watch(self._client)
            self._start_ranks(self._world)
            self._loop()
            self._done.stopped = self._news.stopped
            return self._done

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start_agents(self) -> None:
        job, python = self._job, default_python()
        remote = set(job.remote)
        slots = job.slots
        for index in job.used_hosts:
            ranks = [slot.rank for slot in slots if slot.host == index]
            name = job.hosts[index].name
            if name in remote:
                link = AgentLink.remote(name, ranks, python, job.ssh)
            else:
                link = AgentLink.local(name, ranks, python, stdin=job.stdin and 0 in ranks)
            self._links.append(link)
            self._link_of |= dict.fromkeys(ranks, link)

    def _make_world(self, coordinator: CoordinatorProcess, address: str | None) -> World:
        master = address or "127.0.0.1"
        if not self._link_of[0].here:
            master = self._link_of[0].host
        port = free_port(address or "127.0.0.1")
        where = coordinator.tls_address if address else coordinator.address
        assert where is not None
        if self._verbose:
            self._say(f"coordinator {where} (pid {coordinator.pid}); rendezvous at {master}:{port}")
        return World(where, coordinator.token, coordinator.certificate, self._job.plane, master, port)

    def _start_ranks(self, world: World) -> None:
        for index, link in zip(self._job.used_hosts, self._links, strict=True):
            link.send(start_message(self._job, index, world, here=link.here))
            link.send(wire.Spawn(tuple(rank_spec(self._job, rank, world) for rank in link.ranks)))
            if self._verbose:
                self._say(f"{link.host}: ranks {', '.join(map(str, link.ranks))}")

    # -- the loop -------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._news.descriptor, selectors.EVENT_READ)
            for link in self._links:
                selector.register(link.inbox, selectors.EVENT_READ, link)
            while not self._finished:
                self._watch_writing(selector)
                for key, mask in selector.select(self._timeout()):
                    if key.data is None:
                        self._take_posted()
                    elif mask & selectors.EVENT_WRITE:
                        key.data.flush()
                    else:
                        self._receive(key.data, selector)
                self._handle(e.Tick())

    def _timeout(self) -> float | None:
        when = self._supervisor.deadline
        return None if when is None else max(0.0, when - time.monotonic())

    def _watch_writing(self, selector: selectors.BaseSelector) -> None:
        for link in self._links:
            link.flush()
            watched = link.outbox in selector.get_map()
            if link.outgoing and not watched:
                selector.register(link.outbox, selectors.EVENT_WRITE, link)
            elif not link.outgoing and watched:
                selector.unregister(link.outbox)

    def _take_posted(self) -> None:
        for posted in self._news.take():
            if isinstance(posted, str):
                self._say(posted)
            else:
                self._handle(posted)

    def _receive(self, link: AgentLink, selector: selectors.BaseSelector) -> None:
        try:
            messages = link.receive()
        except ProtocolError as error:
            self._say(f"{link.host}: {error}")
            messages = None
        if messages is None:
            selector.unregister(link.inbox)
            lost = link.ranks if not self._finished else ()
            self._handle(e.Unstartable(lost, link.gone()))
            return
        for message in messages:
            self._take(message)

    def _take(self, message: wire.FromAgent) -> None:
        match message:
            case wire.Output(rank, stream, data):
                if stream == STDERR:
                    self._tails[rank].feed(data)
                self._sink.write(rank, stream, data)
            case wire.ResultPiece(rank, data):
                self._results[rank] += data
            case wire.RankStarted(rank, pid):
                self._news.last_pid[rank] = pid
                self._handle(e.Spawned(rank, pid))
            case wire.RankNotStarted(rank, code, text):
                self._exited(rank, Outcome(code, text=text))
            case wire.RankExited(rank, code, number):
                self._exited(rank, Outcome(code, number))

    def _exited(self, rank: int, outcome: Outcome) -> None:
        self._sink.ended(rank)
        self._done.outcomes[rank] = outcome
        self._handle(e.Exited(rank, outcome))

    # -- effects ----------------------------------------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        for effect in self._supervisor.handle(event, time.monotonic()):
            self._do(effect)

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Say(text):
                self._done.failure.append(text)
                self._say(text)
            case e.Failure():
                self._done.failed = effect.rank
                link = self._link_of[effect.rank]
                self._done.failure = failure_lines(effect, self._tails, "" if link.here else link.host)
                for line in self._done.failure:
                    self._say(line)
            case e.Signal(ranks, number):
                for link in self._links:
                    here = tuple(rank for rank in ranks if rank in link.ranks)
                    if here:
                        link.send(wire.SignalRanks(here, number))
                        link.flush()
            case e.Finish(code):
                self._finished = True
                self._done.code = code
                self._done.results = {rank: bytes(data) for rank, data in self._results.items()}
            case e.Respawn(rank):
                self._respawn(rank)
            case e.Tell() | e.Expect():
                self._tell(effect)

    def _respawn(self, rank: int) -> None:
        assert self._world is not None
        self._results.pop(rank, None)
        self._tails.pop(rank, None)
        self._link_of[rank].send(wire.Spawn((rank_spec(self._job, rank, self._world),)))

    def _tell(self, effect: e.Tell | e.Expect) -> None:
        """Let the coordinator know; if it is gone, that is an event of its own."""
        assert self._client is not None
        with contextlib.suppress(ConnectionError):
            if isinstance(effect, e.Expect):
                self._client.expect(effect.ranks)
            else:
                self._client.rank_lost(effect.rank, self._news.last_pid.get(effect.rank, 0), effect.reason)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def _close_links(self) -> None:
        for link in self._links:
            link.close(_CLOSING)
        self._sink.close()
