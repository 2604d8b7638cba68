"""Which hosts can be used now: which are found, which are put aside after a failure, and which come back. No I/O.

::

    absent ── found ──▶ usable ── fails ──▶ put aside ── cooldown is over, and still found ──▶ usable
       ▲                  │                     │
       └── not found twice in a row ◀───────────┘

A source that fails reports nothing about its hosts, so they stay. One whose answers about a host change again and again is not
followed for that host until it has given the same answer for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdlab.collectives.errors import InvalidRequestError

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
class SayOfHosts:
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


HostEffect = SayOfHosts | HostsChanged


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
    said: int = 0
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
            self._hear(name, self._hosts[name], slots.get(name, 0), now)

    def _hear(self, name: str, entry: _Entry, said: int, now: float) -> None:
        if said == entry.said:
            entry.times += 1
        else:
            entry.said, entry.since, entry.times = said, now, 1
            entry.changes.append(now)
        if entry.wavering:
            if now >= entry.since + STEADY:
                entry.wavering = False
                entry.changes.clear()
                entry.slots = said
            return
        if said == entry.slots:
            return
        often = len(entry.changes) == WAVERS and entry.changes[0] > now - WAVERS_WITHIN
        if often:
            entry.wavering = True
            self._effects.append(
                SayOfHosts(
                    f"{self._source} changes its mind about {name} again and again; it is left as it is until it has said "
                    f"the same for {STEADY:g} s"
                )
            )
        # More slots are believed at once; fewer would let ranks go.
        elif said > entry.slots or entry.times >= GONE_AFTER:
            entry.slots = said

    def _on_failure(self, text: str, now: float) -> None:
        if self._failed is None:
            known = "the hosts that it found before stay" if self._hosts else "it is asked again"
            self._effects.append(SayOfHosts(f"{self._source} is no help: {text}; {known}"))
        self._failed = now

    def _on_host_failed(self, host: str, reason: str, now: float) -> None:
        entry = self._hosts.get(host)
        if entry is None:
            return
        fresh = not entry.cooldown.is_running(now)
        seconds = entry.cooldown.begin(now)
        entry.aside = True
        if fresh:
            self._effects.append(SayOfHosts(f"{host} is put aside for {seconds:g} s: {reason}"))

    def _publish(self, now: float) -> None:
        """Add an effect with the hosts that can be used, if they have changed."""
        usable: dict[str, int] = {}
        for name, entry in self._hosts.items():
            if entry.aside and not entry.cooldown.is_running(now):
                entry.aside = False
                if entry.slots:
                    self._effects.append(SayOfHosts(f"{name} is tried again"))
            if entry.slots and not entry.aside:
                usable[name] = entry.slots
        aside = frozenset(name for name, entry in self._hosts.items() if entry.aside and entry.slots)
        if (usable, aside) != (self._usable, self._aside):
            self._usable, self._aside = usable, aside
            self._effects.append(HostsChanged(dict(usable), aside))
