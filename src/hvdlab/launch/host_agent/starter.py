"""Ranks on other hosts, or this one, each host with an agent of ours: the shell around :class:`AgentLink`.

The agent starts a program for each rank, or forks ranks of a notebook by a fork server of its host.

One thread reads the agents' reports and writes their orders. An agent is started when its host gets its
first rank, and again if it was lost and a rank of its host is restarted.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.settings import own_environment
from hvdlab.collectives.system import HostPosition, host_position
from hvdlab.launch.command import FOREIGN, default_python
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.connection import AgentLink, HostTransport, agent_error
from hvdlab.launch.hosts import Host, assign
from hvdlab.launch.processes import OutputTail, describe_exit
from hvdlab.launch.starter import ENDED_WITH_JOB, Ended, RankObserver, Started, StartRequest, require_running

AGENT_ENDS_WITHIN = 5.0
"""Seconds that an agent has to end its ranks and itself; it gives ranks two between SIGTERM and SIGKILL."""

RankReport = wire.RankStarted | wire.RankNotStarted | wire.RankOutput | wire.ResultPiece | wire.RankExited


class ExecStarter:
    """A :class:`~hvdlab.launch.starter.Starter` of programs.

    Args:
        request: The job's launch request; the ranks run its ``program``, or without one its ``module``.
        ranks: Observer that gets the ranks' events.
        hosts: Where they run, filled in this order.
        transport: Starts an agent on each host, and connects it.
        python: The interpreter of agents and ranks, on every host; empty for the one that each agent runs in.
        launches_ranks: Whether the started processes are the ranks themselves, which get their place in the job by
            variables; otherwise they are programs that start the ranks.
        directory: Working directory of the ranks; empty for this process's own at the time.
        agent: An agent of this host that has no orders yet, if one was started beforehand. It is the first agent of this host.
    """

    def __init__(
        self,
        request: StartRequest,
        ranks: RankObserver,
        hosts: Sequence[Host],
        *,
        transport: HostTransport,
        python: str,
        launches_ranks: bool = True,
        directory: str = "",
        agent: AgentLink | None = None,
    ) -> None:
        self._request, self._ranks = request, ranks
        #: The agent that was started beforehand, until it has orders; guarded by the lock.
        self._agent = agent
        self._hosts, self._transport, self._python = tuple(hosts), transport, python
        self._launches_ranks, self._directory = launches_ranks, directory
        self._lock = threading.Lock()
        #: Host to its agent, while that runs. This and the following are guarded by the lock.
        self._links: dict[str, AgentLink] = {}
        #: Rank to its host, from the order to start it to its end.
        self._host_of: dict[int, str] = {}
        #: Rank to its process, from the agent's report to its end.
        self._pids: dict[int, int] = {}
        #: Host to the most ranks that it has had at once: those of a host that failed come back one by one.
        self._most: dict[str, int] = {}
        #: Links that the thread does not watch yet.
        self._new: list[AgentLink] = []
        #: Whether :meth:`close` was called: no rank may be ordered any more, and the thread ends.
        self._closing = False
        #: Set while no rank is starting or running.
        self._idle = threading.Event()
        self._idle.set()
        self._tails: defaultdict[int, OutputTail] = defaultdict(OutputTail)  # only for the thread
        #: The pipe that wakes the thread; the writing end is guarded by the lock, and -1 once it is closed.
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hvdlab-exec", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks started by their hosts' agents.

        Raises:
            InvalidRequestError: The hosts have too few slots, or this was closed.
            StartError: The program that starts an agent can't be run.
        """
        slots = assign(self._hosts, size)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[slots[rank].host].name, []).append(rank)
        with self._lock:
            require_running(self._closing)
            # All agents before the first order: if one can't be started, no rank runs that `close` would not wait for.
            for host in by_host:
                if host not in self._links:
                    all_here = [slot.rank for slot in slots if self._hosts[slot.host].name == host]
                    self._connect(host, all_here)
            for host, those in by_host.items():
                # Queued under the lock that also guards `_host_of`: the thread sends it only after the ranks are
                # known, and so disowns no report of theirs.
                specs = (self._spec(rank, size, slots[rank].where, host) for rank in those)
                self._links[host].send(wire.Spawn(tuple(specs)))
                self._host_of |= dict.fromkeys(those, host)
            self._idle.clear()
        self._wake()

    def start_on(
        self,
        host: str,
        ranks: Sequence[int],
        size: int,
        variables: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Have ranks started by the agent of a host, which need not be one of those that were given at first.

        Args:
            host: Name of the host.
            ranks: The ranks.
            size: Size of the job.
            variables: Variables of single ranks, beside those of their host.

        Raises:
            InvalidRequestError: This was closed, or ``host`` is no name of a host.
            StartError: The program that starts an agent can't be run.
        """
        Host(host, len(ranks))
        with self._lock:
            require_running(self._closing)
            # In the order of ranks: one that comes back gets the local rank that it had, not one that another has.
            hosts = dict(sorted({**self._host_of, **dict.fromkeys(ranks, host)}.items()))
            here = [rank for rank, its in hosts.items() if its == host]
            self._most[host] = max(self._most.get(host, 0), len(here))
            link = self._links.get(host) or self._connect(host, here)
            numbers, keys = list(hosts), [self._transport.machine(each) for each in hosts.values()]
            own = variables or {}
            specs = (
                self._spec(rank, size, host_position(rank, numbers, keys), host, own.get(rank, {}))
                for rank in ranks
            )
            link.send(wire.Spawn(tuple(specs)))
            self._host_of = hosts
            self._idle.clear()
        self._wake()

    def give_up(self, host: str) -> None:
        """Kill the agent of a host; its ranks are reported as ended."""
        with self._lock:
            link = self._links.get(host)
        if link is not None:
            link.kill()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the rank's process group, by its host's agent."""
        with self._lock:
            link = self._links.get(self._host_of.get(rank, ""))
            if link is not None:
                link.send(wire.SignalRanks((rank,), number))
        self._wake()

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return where a rank is: hosts are filled one after the other."""
        return assign(self._hosts, size)[rank].where

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for ranks that are leaving, then have the agents end the rest. Idempotent."""
        self._idle.wait(timeout)
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wakeup)
        with self._lock:
            writer, self._wakeup_write = self._wakeup_write, -1
        os.close(writer)

    def _wake(self) -> None:
        # Under the lock: once the pipe is closed, its number may be that of another file.
        with self._lock, contextlib.suppress(OSError):  # full: it wakes as well; closed: the thread has ended
            os.write(self._wakeup_write, b"\0")

    def _connect(self, host: str, ranks: Sequence[int]) -> AgentLink:
        """Start the agent of a host; ``ranks`` are all ranks that the host will have. The caller holds the lock."""
        program, here = self._request.program, self._transport.is_here(host)
        most = max(len(ranks), self._most.get(host, 0))
        stdin = here and program is not None and program.stdin and 0 in ranks
        if here and self._agent is not None:
            link, self._agent = self._agent, None
        else:
            link = self._start_agent(host, here, stdin)
        variables = {**self._transport.variables(host), **(program.environment if program else {})}
        command = program.command if program else (self._python, "-m", self._request.module)
        # The path of this host's interpreter may not exist there: each agent puts its own in place of the
        # empty word.
        if not self._python and command[0] == default_python():
            command = ("", *command[1:])
        link.send(
            wire.Start(
                tuple(map(os.fsencode, command)),
                os.fsencode(self._directory or os.getcwd()),
                {os.fsencode(name): os.fsencode(value) for name, value in variables.items()},
                removed=FOREIGN,
                function=program.function if program else b"",
                threads=most,
                stdin_rank=0 if stdin else -1,
                coordinator=self._request.world.coordinator,
                interfaces=program.interfaces if program else (),
                forked="" if program else self._request.forked,
                preload=program.preload if program else (),
            )
        )
        self._links[host] = link
        self._new.append(link)
        return link

    def _start_agent(self, host: str, here: bool, stdin: bool) -> AgentLink:
        # For a program, the standard error of the shell that reaches a host belongs on the terminal of the program.
        errors = None if self._request.program else tempfile.TemporaryFile()  # noqa: SIM115  (belongs to the link)
        try:
            if here:
                return AgentLink.local(host, self._python, stdin=stdin, errors=errors)
            return AgentLink(host, self._transport.connect(host, self._python, errors))
        except OSError as error:
            if errors is not None:
                errors.close()
            raise agent_error(host, error) from error

    def _spec(
        self, rank: int, size: int, where: HostPosition, host: str, variables: Mapping[str, str] | None = None
    ) -> wire.RankSpec:
        if not self._launches_ranks:
            return wire.RankSpec(rank, {})
        environment = {**(variables or {}), **own_environment(self._request.world, rank, size, where)}
        if self._request.program is not None:
            environment["HOROVOD_HOSTNAME"] = host
        return wire.RankSpec(rank, environment)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            while not self._step(selector):
                pass
        for link in self._links.values():
            link.hang_up()  # all at once, so that they end side by side
        for link in self._links.values():
            link.close(AGENT_ENDS_WITHIN)
        for rank in list(self._host_of):
            self._end(rank, ENDED_WITH_JOB)

    def _step(self, selector: selectors.BaseSelector) -> bool:
        """Run one round. Returns whether it was the last one."""
        with self._lock:
            if self._closing:
                return True
            for link in self._new:
                selector.register(link.inbox, selectors.EVENT_READ, link)
            self._new.clear()
            for link in self._links.values():
                self._flush(link, selector)
        for key, mask in selector.select():
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            elif mask & selectors.EVENT_READ and key.fd == key.data.inbox:
                self._receive(key.data, selector)
        return False

    @staticmethod
    def _flush(link: AgentLink, selector: selectors.BaseSelector) -> None:
        """Write as much as the pipes accept; watch for room if bytes are left."""
        link.flush()
        watched = link.outbox in selector.get_map()
        if link.outgoing and not watched:
            selector.register(link.outbox, selectors.EVENT_WRITE, link)
        elif not link.outgoing and watched:
            selector.unregister(link.outbox)

    def _receive(self, link: AgentLink, selector: selectors.BaseSelector) -> None:
        try:
            messages = link.receive()
        except ProtocolError as error:
            self._lost(link, f"the agent of {link.host} sent something else than messages: {error}", selector)
            return
        if messages is None:
            self._lost(link, link.gone(), selector)
            return
        for message in messages:
            if isinstance(message, wire.OrderFailed):
                self._order_failed(message, link.host)
            elif self._knows(message.rank, link.host):
                try:
                    self._report(message, link.host)
                except Exception:  # noqa: BLE001  (this thread serves all hosts, and must go on for their ranks)
                    print(
                        f"hvdlab: a report of the agent of {link.host} could not be handled:", file=sys.stderr
                    )
                    traceback.print_exc()
            else:
                self._disown(message, link)

    def _knows(self, rank: int, host: str) -> bool:
        with self._lock:
            return self._host_of.get(rank) == host

    def _disown(self, message: RankReport, link: AgentLink) -> None:
        """Log a report of a rank that was not ordered from an agent, or was given up; end its process if it has just begun."""
        report = type(message).__name__
        print(
            f"hvdlab: the agent of {link.host} sent {report} for rank {message.rank}, which does not run there",
            file=sys.stderr,
        )
        if isinstance(message, wire.RankStarted):
            with self._lock:
                link.send(wire.SignalRanks((message.rank,), signal.SIGKILL))

    def _order_failed(self, message: wire.OrderFailed, host: str) -> None:
        """Log an order that an agent could not carry out, and give up the ranks that it may have been for.

        Which ranks these are can't be known if the order was not read. Those that wait for their process are given up; one that
        another order starts after all is killed at its report.
        """
        print(f"hvdlab: the agent of {host} could not carry out an order: {message.text}", file=sys.stderr)
        if not message.unread:
            return
        with self._lock:
            waiting = [rank for rank, its in self._host_of.items() if its == host and rank not in self._pids]
        for rank in waiting:
            self._end(rank, f"the agent of {host} could not read an order: {message.text}", 1)

    def _report(self, message: RankReport, host: str) -> None:
        program = self._request.program
        match message:
            case wire.RankOutput(rank, stream, data) if program is not None:
                program.output.write(rank, stream, data)
            case wire.RankOutput(rank, _, data):
                self._tails[rank].add(data)
            case wire.RankStarted(rank, pid):
                with self._lock:
                    self._pids[rank] = pid
                self._ranks.handle(Started(rank, pid, host))
            case wire.RankNotStarted(rank, code, text):
                self._end(rank, text, code)
            case wire.RankExited(rank, code, number):
                reason = message.reason or describe_exit(code, number)
                known = None if number or code < 0 else code
                self._end(rank, reason, known, number, message)
            case wire.ResultPiece(rank, data) if program is not None:
                program.output.returned(rank, data)

    def _lost(self, link: AgentLink, reason: str, selector: selectors.BaseSelector) -> None:
        """Handle the loss of an agent, whose ranks end with it or soon after it; another agent may replace it."""
        for descriptor in (link.inbox, link.outbox):
            if descriptor in selector.get_map():
                selector.unregister(descriptor)
        with self._lock:
            # Before the ends are reported: an observer that starts the ranks again at once must get another agent.
            del self._links[link.host]
            lost = [rank for rank, host in self._host_of.items() if host == link.host]
        link.close(0.0)
        for rank in lost:
            self._end(rank, reason)

    def _end(
        self,
        rank: int,
        reason: str,
        code: int | None = None,
        number: int = 0,
        said: wire.RankExited | None = None,
    ) -> None:
        with self._lock:
            self._host_of.pop(rank, None)
            pid = self._pids.pop(rank, 0)
        tail = self._tails.pop(rank, OutputTail()).text()
        detail, left = "", None
        if said is not None:
            tail, detail, left = tail or said.tail, said.detail, said.left
        self._ranks.handle(Ended(rank, pid, reason, tail, detail, code, number, left))
        # After the report: a wait for idle ranks must not end before the observer has it.
        with self._lock:
            if not self._host_of:  # the observer may have started others
                self._idle.set()
