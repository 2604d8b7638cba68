"""Hosts that come and go: their sources, and which of them can be used now.

A source is a script, a list, or an object of the user's, asked once a second. The table (:class:`HostTable`, no I/O) knows which hosts are
found, which are put aside after a failure, and which come back.

::

    absent ── found ──▶ usable ── fails ──▶ put aside ── cooldown is over, and still found ──▶ usable
       ▲                  │                     │
       └── not found twice in a row ◀───────────┘

A source that fails reports nothing about its hosts, so they stay. One whose answers about a host change again and again is not
followed for that host until it has given the same answer for a while.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.hosts import Host, parse_hosts

SCRIPT_WITHIN = 10.0
"""Seconds within which a script must have printed its hosts."""
KILLED_WITHIN = 1.0
"""Seconds that the processes of a script may take to be gone after SIGKILL."""


class HostSource:
    """Source of the hosts and the number of ranks that each accepts. Derive from it, and override :meth:`find`.

    :meth:`find` is called about once a second, on a thread of its own, and can be slow: no other work waits for it.
    """

    def find(self) -> Mapping[str, int]:
        """Return the hosts that can be used now, by name, each with its number of slots.

        Any exception of this is reported once, and the hosts that were known before stay until it answers again.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say which hosts there are: override find()"
        )


class HostDiscovery(HostSource):
    """Base class of host sources, under Horovod's name: derive from it, and override :meth:`find_available_hosts_and_slots`."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts that can be used now, by name, each with its number of slots."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say which hosts there are: override find_available_hosts_and_slots()"
        )

    def find(self) -> Mapping[str, int]:
        return self.find_available_hosts_and_slots()


class FixedHosts(HostDiscovery):
    """A source of the hosts that it was given last.

    Args:
        host_slots: Number of slots by the host's name.
    """

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self._host_slots

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace the hosts. Any thread."""
        self._host_slots = dict(host_slots)


class HostDiscoveryScript(HostDiscovery):
    """The hosts that a command prints, one per line: ``name`` or ``name:slots``. Empty lines are passed over.

    Args:
        discovery_script: A command line for the shell.
        slots: Slots of a host that is printed without a number; 1 if ``None``.
        within: Time limit of the command, in seconds; then it is killed, with all that it started.
    """

    def __init__(
        self, discovery_script: str, slots: int | None = None, *, within: float = SCRIPT_WITHIN
    ) -> None:
        if slots is not None and slots < 1:
            raise InvalidRequestError(f"--slots-per-host {slots}: a host has at least one slot.")
        self._discovery_script, self._default_slots, self._within = discovery_script, slots or 1, within

    def check(self) -> None:
        """Refuse a command that names a file which can't be run, before anything waits for its hosts.

        Commands that only a shell can read, and those without a path, are left to the shell.

        Raises:
            InvalidRequestError: The file is missing, a folder, or not executable.
        """
        if re.search(r"[|&;<>()$`\n]", self._discovery_script):
            return
        try:
            path = next(iter(shlex.split(self._discovery_script)), "")
        except ValueError:  # a quote without its end: the shell reports it
            return
        if not re.fullmatch(r"[\w.+@-]*(/[\w.+@-]*)+", path):
            return
        if not os.path.exists(path):
            raise InvalidRequestError(f"The script that finds hosts, {path}, does not exist.")
        if os.path.isdir(path):
            raise InvalidRequestError(f"The script that finds hosts, {path}, is a folder.")
        if not os.access(path, os.X_OK):
            raise InvalidRequestError(
                f"The script that finds hosts, {path}, is not executable; `chmod +x {path}` makes it so."
            )

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the command.

        Raises:
            StartError: It could not be run, failed, exceeded its limit, or printed a line that is no host; the message names the cause.
        """
        hosts: dict[str, int] = {}
        for line in self._printed().splitlines():
            text = line.strip()
            if not text:
                continue
            host = self._host(text)
            hosts[host.name] = hosts.get(host.name, 0) + host.slots
        return hosts

    def _host(self, text: str) -> Host:
        try:
            if "," in text:
                raise InvalidRequestError("one line names one host")
            (host,) = parse_hosts(text)
        except InvalidRequestError:
            raise StartError(
                f"it printed {text[:60]!r}, which is no host; a line is `name` or `name:slots`"
            ) from None
        bare = not text.rpartition(":")[2].isdecimal() or text.endswith("]")
        return Host(host.name, self._default_slots) if bare else host

    def _printed(self) -> str:
        with subprocess.Popen(
            self._discovery_script,
            shell=True,  # it is the user's own command line
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            out, err = bytearray(), bytearray()
            read = {process.stdout.fileno(): out, process.stderr.fileno(): err}
            try:
                ended = _read_to_the_end(process.pid, read, Deadline(self._within))
            finally:
                # Before the shell is reaped: from then on another group may have its number.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also its processes in the background
            if not ended:  # its processes hold the pipes until they are gone, unless one has left the group
                _read_to_the_end(process.pid, read, Deadline(KILLED_WITHIN))
        if not ended:
            raise StartError(f"it did not end within {self._within:g} s, and was killed")
        if process.returncode:
            last = err.decode(errors="backslashreplace").strip().rpartition("\n")[2][:200]
            code = process.returncode
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            )
            raise StartError(f"it {how}" + (f": {last}" if last else ""))
        return out.decode(errors="backslashreplace")


def _read_to_the_end(pid: int, read: Mapping[int, bytearray], deadline: Deadline) -> bool:
    """Read pipes, by descriptor, until they and a process have ended. Returns whether all have; the process is not reaped."""
    pidfd = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            for descriptor in (pidfd, *read):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map() and not deadline.expired:
                for key, _ in selector.select(deadline.remaining()):
                    data = os.read(key.fd, 1 << 16) if key.fd in read else b""
                    if data:
                        read[key.fd].extend(data)
                    else:
                        selector.unregister(key.fd)
            return not selector.get_map()
    finally:
        os.close(pidfd)


class _DuckTypedSource(HostSource):
    """An object that has one of the two methods, but neither base class; or a plain function."""

    def __init__(self, find: Callable[[], object]) -> None:
        self._find = find

    def find(self) -> Mapping[str, int]:
        return checked(self._find())


def as_host_source(given: object, slots: int | None = None) -> HostSource:
    """Return the source of hosts for anything that a user may give as one.

    Args:
        given: A :class:`HostSource` (a :class:`HostDiscovery`); an object with ``find`` or
            ``find_available_hosts_and_slots``; a function that returns ``{host: slots}``; such a mapping; hosts as
            ``["a:2", "b"]``; or the command line of a script, as text.
        slots: Slots of each host that a script prints, or a list names, without a number.

    Raises:
        InvalidRequestError: ``given`` is none of these, or a script that can't be run.
    """
    if isinstance(given, HostSource):
        return given
    if isinstance(given, str | os.PathLike):
        script = HostDiscoveryScript(os.fspath(given), slots)
        script.check()
        return script
    if isinstance(given, Mapping):
        return FixedHosts(checked(given))
    for method in ("find", "find_available_hosts_and_slots"):
        if callable(found := getattr(given, method, None)) and not isinstance(given, type):
            return _DuckTypedSource(found)
    if callable(given) and not isinstance(given, type):
        return _DuckTypedSource(given)
    names = list(given) if isinstance(given, Iterable) else [None]
    if names and all(isinstance(each, str) for each in names):
        texts = [str(each).strip() for each in names]
        hosts = parse_hosts(",".join(texts))
        return FixedHosts({h.name: slots if slots and h.name in texts else h.slots for h in hosts})
    raise InvalidRequestError(
        f"{given!r} is no source of hosts; give a script's command line, {{'a': 2, 'b': 2}}, ['a:2', 'b:2'], or an object "
        "with find()."
    )


def checked(found: object) -> dict[str, int]:
    """Return the hosts that a source found, without those that have no slots.

    Raises:
        InvalidRequestError: ``found`` is no mapping from hosts to slots.
    """
    if not isinstance(found, Mapping):
        raise InvalidRequestError(f"it found {found!r:.80}, which is not {{host: slots}}")
    for name, slots in found.items():
        if not isinstance(name, str) or isinstance(slots, bool) or not isinstance(slots, int) or slots < 0:
            raise InvalidRequestError(f"it found {name!r:.60}: {slots!r:.40}, which is no host and its slots")
        # Made only for the check of its name: no slots are a valid answer here, but no Host.
        Host(name, max(1, slots))
    return {name: slots for name, slots in cast("Mapping[str, int]", found).items() if slots}


class HostObserver(Protocol):
    """Observer of a source's answers; all methods are called on the asker's thread."""

    def asked(self) -> None:
        """Note that the source is asked now."""

    def found(self, slots: dict[str, int], /) -> None:
        """Receive the hosts that the source found, with their slots."""

    def failed(self, reason: str, /) -> None:
        """Receive a clause on why the source found no hosts."""


class HostAsker:
    """Thread that asks a source again and again.

    The thread is a daemon, since a source of the user's may never return from ``find()``; :meth:`close` does not wait for
    such a source.

    Args:
        source: The source.
        observer: Gets each question and each answer.
        interval: Seconds between an answer and the next question.
    """

    def __init__(
        self,
        source: HostSource,
        observer: HostObserver,
        interval: float = 1.0,
    ) -> None:
        self._source, self._interval = source, interval
        self._observer = observer
        self._closing = threading.Event()
        #: Held during each report, so that none comes after :meth:`close`.
        self._reporting = threading.Lock()
        #: Set while the source is asked, for a time that only the source knows.
        self._answering = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlab-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more, and report nothing more. Idempotent."""
        with self._reporting:
            self._closing.set()
        if not self._answering.is_set():  # otherwise only the source knows when it returns
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._reporting:
                # Together: close() joins this thread unless it has seen that the source is being asked.
                if self._closing.is_set():
                    return
                self._observer.asked()
                self._answering.set()
            try:
                hosts = checked(self._source.find())
            except Exception as error:  # noqa: BLE001  (reported; it is the user's code)
                text = str(error) or "it found no hosts"
                ours = isinstance(error, StartError | InvalidRequestError)
                text = text.partition("\n")[0] if ours else f"it raised {type(error).__name__}: {text}"
                self._answering.clear()
                # The flag is cleared before the report: a close() that waits for the report must then join
                # this thread.
                self._report(partial(self._observer.failed, text))
            else:
                self._answering.clear()
                self._report(partial(self._observer.found, hosts))
            self._closing.wait(self._interval)

    def _report(self, say: Callable[[], None]) -> None:
        with self._reporting:
            if not self._closing.is_set():
                say()


LATE = 15.0
"""Seconds without an answer after which the operator reads that the source hangs; longer than a script may take."""
GONE_AFTER = 2
"""How often in a row a source must not find a host, or find fewer slots, before that is believed."""
WAVERS = 4
"""If the answer about a host changes this often within :data:`WAVERS_WITHIN` seconds, the source is not followed for it."""
WAVERS_WITHIN = 30.0
"""Seconds within which the changes of an answer are counted."""
STEADY = 10.0
"""Seconds that such a source has to say the same before it is followed again."""
QUIET = 60.0
"""Seconds of good answers after which a failure of the source is reported again."""
COOLDOWN = (10.0, 600.0)
"""Seconds that a host is put aside after its first failure, and at most; the defaults."""


@dataclass(frozen=True, slots=True)
class HostsAsked:
    """Event: the source is being asked."""


@dataclass(frozen=True, slots=True)
class HostsFound:
    """Event: the source has answered.

    Attributes:
        slots: Slots of each host, by its name.
    """

    slots: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NotFound:
    """Event: the source has failed.

    Attributes:
        text: Why, as a clause that begins with *it*.
    """

    text: str


@dataclass(frozen=True, slots=True)
class HostFailed:
    """Event: a host can't be used: it refused, or was lost.

    Attributes:
        host: The host's name.
        reason: Why, as a clause.
    """

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostTick:
    """Event: time has passed; :attr:`HostTable.deadline` may be due."""


HostEvent = HostsAsked | HostsFound | NotFound | HostFailed | HostTick


@dataclass(frozen=True, slots=True)
class HostNotice:
    """Effect: one line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class HostsChanged:
    """Effect: these hosts can be used from now on, and no others.

    Attributes:
        slots: Slots of each; the hosts that were known first come first.
        aside: Hosts that are there, but put aside.
    """

    slots: Mapping[str, int]
    aside: frozenset[str] = frozenset()


HostEffect = HostNotice | HostsChanged


class Cooldown:
    """Time for which a host is put aside: twice as long after each failure.

    Args:
        shortest, longest: Seconds after the first failure, and at most.

    Attributes:
        until: When the cooldown is over, on the clock of :meth:`begin`; ``None`` before the first failure.
        failures: How many failures there were.

    Raises:
        InvalidRequestError: The two are no range of seconds.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        check_cooldown(shortest, longest)
        self.shortest, self.longest = shortest, longest
        self.until: float | None = None
        self.failures = 0

    def begin(self, now: float) -> float:
        """Put a failed host aside. Returns for how many seconds it is put aside; a cooldown that runs is not prolonged."""
        if self.until is not None and now < self.until:
            return self.until - now
        # The exponent has a bound because 2.0 ** 1024 raises OverflowError.
        seconds = min(self.longest, self.shortest * 2.0 ** min(self.failures, 64))
        self.failures += 1
        self.until = now + seconds
        return seconds

    def is_running(self, now: float) -> bool:
        """Return whether the host is put aside."""
        return self.until is not None and now < self.until


def check_cooldown(shortest: float, longest: float) -> None:
    """Raise ``InvalidRequestError`` unless these are the ends of a range of seconds."""
    if not 0 < shortest <= longest:
        raise InvalidRequestError(
            f"--blacklist-cooldown-range {shortest:g} {longest:g}: give two numbers of seconds above 0, the smaller one "
            "first."
        )


@dataclass(slots=True)
class _Entry:
    """State of a host."""

    cooldown: Cooldown
    #: Slots by the source's last answer, 0 if it did not have the host; since when, and how often in a row, it answers so.
    reported: int = 0
    since: float = 0.0
    times: int = 0
    #: Slots that are believed; 0 for a host that is not there.
    slots: int = 0
    #: When the source's answer about it changed.
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=WAVERS))
    #: Whether the source is not followed for this host now, which a line has reported.
    wavering: bool = False
    #: Whether it is put aside, as far as lines have reported.
    aside: bool = False


class HostTable:
    """State machine of the hosts that can be used. Feed it with :meth:`handle`; call it again with :class:`HostTick` at :attr:`deadline`.

    Args:
        cooldown: Seconds that a host is put aside after its first failure, and at most.
        source: The name of the source in lines for the operator: ``the host discovery script``.
    """

    def __init__(self, cooldown: tuple[float, float] = COOLDOWN, source: str = "the source of hosts") -> None:
        check_cooldown(*cooldown)
        self._cooldown, self._source = cooldown, source
        self._hosts: dict[str, _Entry] = {}  # in the order in which they were first found
        #: The hosts as the last effect has reported them.
        self._usable: dict[str, int] = {}
        self._aside: frozenset[str] = frozenset()
        #: When the source was asked, if it has not answered yet.
        self._asked: float | None = None
        #: When the source failed last; ``None`` if it never did, or has answered well for long enough since.
        self._failed: float | None = None
        #: Effects of the event that :meth:`handle` is at.
        self._effects: list[HostEffect] = []

    @property
    def usable(self) -> dict[str, int]:
        """Return the slots of the hosts that can be used, by name; those that were found first come first."""
        return dict(self._usable)

    @property
    def deadline(self) -> float | None:
        """Return when :class:`HostTick` is due, or ``None``."""
        times = [e.cooldown.until for e in self._hosts.values() if e.aside and e.cooldown.until is not None]
        if self._asked is not None and self._failed is None:
            times.append(self._asked + LATE)
        return min(times, default=None)

    def handle(self, event: HostEvent, now: float) -> list[HostEffect]:
        """Handle one event."""
        self._effects = []
        match event:
            case HostsAsked():
                self._asked = now
            case HostsFound(slots):
                self._asked = None
                self._on_found(slots, now)
            case NotFound(text):
                self._asked = None
                self._on_failure(text, now)
            case HostFailed(host, reason):
                self._on_host_failed(host, reason, now)
            case HostTick():
                if self._asked is not None and now >= self._asked + LATE and self._failed is None:
                    self._on_failure(f"it has not answered for {LATE:g} s", now)
        self._publish(now)
        return self._effects

    def _on_found(self, slots: Mapping[str, int], now: float) -> None:
        if self._failed is not None and now >= self._failed + QUIET:
            self._failed = None
        for name in [*slots, *(name for name in self._hosts if name not in slots)]:
            if name not in self._hosts:
                self._hosts[name] = _Entry(Cooldown(*self._cooldown))
            self._record_answer(name, self._hosts[name], slots.get(name, 0), now)

    def _record_answer(self, name: str, entry: _Entry, reported: int, now: float) -> None:
        if reported == entry.reported:
            entry.times += 1
        else:
            entry.reported, entry.since, entry.times = reported, now, 1
            entry.changes.append(now)
        if entry.wavering:
            if now >= entry.since + STEADY:
                entry.wavering = False
                entry.changes.clear()
                entry.slots = reported
            return
        if reported == entry.slots:
            return
        often = len(entry.changes) == WAVERS and entry.changes[0] > now - WAVERS_WITHIN
        if often:
            entry.wavering = True
            self._effects.append(
                HostNotice(
                    f"{self._source} changes its mind about {name} again and again; it is left as it is until it has said "
                    f"the same for {STEADY:g} s"
                )
            )
        # More slots are believed at once; fewer would let ranks go.
        elif reported > entry.slots or entry.times >= GONE_AFTER:
            entry.slots = reported

    def _on_failure(self, text: str, now: float) -> None:
        if self._failed is None:
            known = "the hosts that it found before stay" if self._hosts else "it is asked again"
            self._effects.append(HostNotice(f"{self._source} is no help: {text}; {known}"))
        self._failed = now

    def _on_host_failed(self, host: str, reason: str, now: float) -> None:
        entry = self._hosts.get(host)
        if entry is None:
            return
        fresh = not entry.cooldown.is_running(now)
        seconds = entry.cooldown.begin(now)
        entry.aside = True
        if fresh:
            self._effects.append(HostNotice(f"{host} is put aside for {seconds:g} s: {reason}"))

    def _publish(self, now: float) -> None:
        """Add an effect with the hosts that can be used, if they have changed."""
        usable: dict[str, int] = {}
        for name, entry in self._hosts.items():
            if entry.aside and not entry.cooldown.is_running(now):
                entry.aside = False
                if entry.slots:
                    self._effects.append(HostNotice(f"{name} is tried again"))
            if entry.slots and not entry.aside:
                usable[name] = entry.slots
        aside = frozenset(name for name, entry in self._hosts.items() if entry.aside and entry.slots)
        if (usable, aside) != (self._usable, self._aside):
            self._usable, self._aside = usable, aside
            self._effects.append(HostsChanged(dict(usable), aside))
