"""Torch's store over the coordinator: the group's first rank keeps the values, and the ranks' control threads carry the mail.

It needs no further connections, and no thread waits in C++: Ctrl-C ends a wait, and so does the end of any rank.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, NotInitializedError, Pending
from hvdlab.collectives.time_limits import Deadline

_ASK, _ANSWER = "c10d.store.ask", "c10d.store.answer"
_REMEMBERED = 256
"""Answers to each rank that the keeper remembers, for requests that come again."""
_FIRST_BITS = 62
"""Random bits of the number of a process's first request: all numbers after it still fit the wire's 64."""
_FORMER = 4096
"""Former spaces that the keeper remembers, for requests that come after their end."""


class KeeperRequest(msgspec.Struct, frozen=True, array_like=True):
    """A rank's request to the rank that keeps the values.

    Attributes:
        number: The asking rank's count of its requests; the answer has the same.
        space: The values that it is about: each default group has a space of its own.
        operation: Name of the operation: ``open``, ``set``, ``get``, ``add``, ``compare``, ``append``, ``wait``, ``check``, ``delete``,
            ``count``, ``list``, or ``forget``, which withdraws the request with the number ``amount``.
        keys: The keys.
        values: Their values; for ``compare`` the expected and the desired one.
        amount: The number that ``add`` adds.
    """

    number: int
    space: str
    operation: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0


class KeeperAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The keeper's answer to a :class:`KeeperRequest`, with the fields that its operation returns.

    ``gone`` means that the values no longer exist, since the default group was made again.
    """

    number: int
    values: tuple[bytes, ...] = ()
    amount: int = 0
    keys: tuple[str, ...] = ()
    gone: bool = False


class StoreState:
    """The values, and the requests that wait for some. No I/O.

    A rank sends a request again when it can't know whether it had arrived; it gets the same answer, and nothing is done twice.
    """

    def __init__(self) -> None:
        #: Values by space and key.
        self._spaces: dict[str, dict[str, bytes]] = {}
        #: Spaces of former default groups, the oldest first: requests for them are answered with ``gone``. A space that is neither
        #: here nor there is about to be opened: the ranks have met, and this one has asked before the keeper has opened it.
        self._former: dict[str, None] = {}
        #: Requests whose keys are not all set yet, each with its sender.
        self._waiting: list[tuple[int, KeeperRequest]] = []
        #: The latest answers to each rank, by the requests' numbers.
        self._answered: dict[int, OrderedDict[int, KeeperAnswer]] = {}

    def handle(self, sender: int, request: KeeperRequest) -> list[tuple[int, KeeperAnswer]]:
        """Carry out a rank's request; returns the answers to send now, each with its rank: also those to earlier requests that waited."""
        known = self._answered.setdefault(sender, OrderedDict())
        if request.number in known:
            return [(sender, known[request.number])]
        if request.operation == "forget":
            self._waiting = [
                each for each in self._waiting if (each[0], each[1].number) != (sender, request.amount)
            ]
            return []
        # Sent again after a reconnection: one answer is enough.
        if (sender, request) in self._waiting:
            return []
        # Before the space is looked up, which would make a former one again.
        if request.space in self._former:
            return [(sender, KeeperAnswer(request.number, gone=True))]
        if request.operation == "open":
            found = self._open(request.space)
        else:
            values = self._spaces.setdefault(request.space, {})
            if request.operation in ("get", "wait") and not all(key in values for key in request.keys):
                self._waiting.append((sender, request))
                return []
            found = []
        found.append((sender, self._answer(request)))
        # After the request itself, whose values may be those that others wait for.
        found += self._freed(request.space)
        for rank, answer in found:
            answers = self._answered.setdefault(rank, OrderedDict())
            answers[answer.number] = answer
            while len(answers) > _REMEMBERED:
                answers.popitem(last=False)
        return found

    def _open(self, space: str) -> list[tuple[int, KeeperAnswer]]:
        """Begin a space and drop all others, since a new default group is made; returns answers to requests that waited in those."""
        self._former |= dict.fromkeys(each for each in self._spaces if each != space)
        while len(self._former) > _FORMER:
            del self._former[next(iter(self._former))]
        # With the values that other ranks have set in it already: they may ask before the keeper has opened it.
        self._spaces = {space: self._spaces.get(space, {})}
        gone = [
            (rank, KeeperAnswer(request.number, gone=True))
            for rank, request in self._waiting
            if request.space != space
        ]
        self._waiting = [each for each in self._waiting if each[1].space == space]
        return gone

    def _freed(self, space: str) -> list[tuple[int, KeeperAnswer]]:
        values = self._spaces[space]
        ready = [
            (rank, request)
            for rank, request in self._waiting
            if request.space == space and all(k in values for k in request.keys)
        ]
        self._waiting = [each for each in self._waiting if each not in ready]
        return [(rank, self._answer(request)) for rank, request in ready]

    def _answer(self, request: KeeperRequest) -> KeeperAnswer:
        """Carry out a request; the keys that it needs are set."""
        values, number = self._spaces[request.space], request.number
        key = request.keys[0] if request.keys else ""
        match request.operation:
            case "set":
                values.update(zip(request.keys, request.values, strict=True))
            case "get":
                return KeeperAnswer(number, tuple(values[each] for each in request.keys))
            case "append":
                values[key] = values.get(key, b"") + request.values[0]
            case "add":
                total = int(values.get(key, b"0")) + request.amount
                values[key] = str(total).encode()
                return KeeperAnswer(number, amount=total)
            case "compare":
                expected, wanted = request.values
                # As torch's stores do: a key that is not set counts as empty, and if another value was expected, the answer is
                # the expected value.
                if values.get(key, b"") == expected:
                    values[key] = wanted
                return KeeperAnswer(number, (values.get(key, expected),))
            case "check":
                return KeeperAnswer(number, amount=int(all(each in values for each in request.keys)))
            case "delete":
                return KeeperAnswer(number, amount=int(values.pop(key, None) is not None))
            case "count":
                return KeeperAnswer(number, amount=len(values))
            case "list":
                return KeeperAnswer(number, keys=tuple(values))
        return KeeperAnswer(number)


class StoreLink:
    """A rank's end of the store: it asks the keeper, and answers if it is the keeper itself. One object for each engine.

    Args:
        engine: The rank's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state = StoreState()
        #: Guards the following; notified when an answer has come, a rank is gone, or a store was closed.
        self._changed = threading.Condition()
        # The keeper remembers answers by rank and number. A rank's successor, in another process, must not get those of its predecessor.
        self._number = secrets.randbits(_FIRST_BITS)
        #: Requests without an answer, by number, each with the rank that keeps the values.
        self._asked: dict[int, tuple[int, KeeperRequest]] = {}
        #: Answers that have arrived and that no thread has read yet, by number.
        self._answers: dict[int, KeeperAnswer] = {}
        engine.on_mail(_ASK, self._on_ask)
        engine.on_mail(_ANSWER, self._on_answer)
        engine.on_world(self.wake)
        engine.on_leave(lambda reason: self.wake())
        engine.on_reconnected(self._ask_again)

    def ask(
        self,
        keeper: int,
        members: Sequence[int],
        space: str,
        operation: str,
        seconds: float,
        closed: threading.Event | None = None,
        **what: Any,
    ) -> KeeperAnswer:
        """Ask the rank that keeps the values, and wait for its answer.

        Args:
            keeper: The rank that keeps the values.
            members: The ranks of the group: the end of any of them ends the wait.
            space, operation: See :class:`KeeperRequest`.
            seconds: Limit of the wait.
            closed: An event that ends the wait; call :meth:`wake` after setting it.
            what: Further fields of :class:`KeeperRequest`.

        Raises:
            AbortedError: A rank died or left, the default group was made again, or ``closed`` was set.
            DistStoreError: The keys were not set in time.
            NotInitializedError: hvdlab was shut down meanwhile.
            KeyboardInterrupt: The user interrupted.
        """
        with self._changed:
            self._number += 1
            number = self._number
            request = KeeperRequest(number, space, operation, **what)
            # Before the request is sent: an answer to a number that is not in here is dropped.
            self._asked[number] = keeper, request
        deadline = Deadline(seconds)
        answer: KeeperAnswer | None = None
        try:
            self._engine.post(_ASK, msgspec.msgpack.encode(request), [keeper])
            with self._changed:
                while (answer := self._answers.pop(number, None)) is None:
                    if closed is not None and closed.is_set():
                        raise _ended(request, Cause(CauseKind.SHUTDOWN, (), "the store was closed"))
                    self._raise_if_ended(request, members)
                    if deadline.expired:
                        raise dist.DistStoreError(
                            f"{operation}: no rank has set {', '.join(request.keys)} within {seconds:g} s"
                        )
                    self._changed.wait(deadline.remaining())
        finally:
            with self._changed:
                self._asked.pop(number, None)
                # The answer may have come after an exception has ended the wait, and nothing else would remove it.
                self._answers.pop(number, None)
            # The keeper would go on to hold the request of a wait that is over.
            if answer is None:
                self._engine.post(
                    _ASK, msgspec.msgpack.encode(KeeperRequest(0, space, "forget", amount=number)), [keeper]
                )
        assert answer is not None
        if answer.gone:
            raise _ended(request, Cause(CauseKind.MEMBERSHIP, (), "the default process group was made anew"))
        return answer

    def _raise_if_ended(self, request: KeeperRequest, members: Sequence[int]) -> None:
        if self._engine.closed:
            raise NotInitializedError("the process group's store")
        lost = sorted(set(members) - set(self._engine.living))
        if lost:
            reason = self._engine.death_of(lost[0])
            kind = CauseKind.RANK_DIED if reason else CauseKind.RANK_LEFT
            text = f"rank {lost[0]} died: {reason}" if reason else f"rank {lost[0]} left the job"
            raise _ended(request, Cause(kind, tuple(lost), text))

    def wake(self) -> None:
        """Let the threads that wait see that a rank is gone, or that their store was closed. Any thread."""
        with self._changed:
            self._changed.notify_all()

    def _on_ask(self, sender: int, body: bytes) -> None:
        """Answer another rank's request. Control thread, the only thread that touches the values."""
        for rank, answer in self._state.handle(sender, msgspec.msgpack.decode(body, type=KeeperRequest)):
            self._engine.post(_ANSWER, msgspec.msgpack.encode(answer), [rank])

    def _on_answer(self, sender: int, body: bytes) -> None:
        answer = msgspec.msgpack.decode(body, type=KeeperAnswer)
        with self._changed:
            # A second answer, to a request that was sent again, is dropped.
            if answer.number in self._asked:
                self._answers[answer.number] = answer
                self._changed.notify_all()

    def _ask_again(self) -> None:
        """Send all requests without an answer again: those on their way when the coordinator died may be lost. Control thread."""
        with self._changed:
            # A copy: users' threads, whose waits end meanwhile, remove their requests.
            asked = list(self._asked.values())
        for keeper, request in asked:
            self._engine.post(_ASK, msgspec.msgpack.encode(request), [keeper])


def _ended(request: KeeperRequest, cause: Cause) -> AbortedError:
    name = f"store.{request.operation}"
    return AbortedError(Pending(name, ", ".join(request.keys)), cause)


# Torch's stubs declare only some of its methods.
_Store: Any = dist.Store  # type: ignore[attr-defined]


class HvdlabStore(_Store):  # type: ignore[misc]
    """A ``torch.distributed.Store`` for the groups of a pool, or of a job under ``hvdlab run``.

    C++ code, such as that of the Gloo backend, may use it, too, but does not keep it alive: Python has to.

    All methods that ask the keeper raise ``AbortedError`` if a rank dies or leaves meanwhile, the default group is made again or the store is closed,
    and ``DistStoreError`` after the timeout.

    Args:
        link: This rank's link.
        space: Name of the space that the values are in, equal on all ranks.
        members: The ranks that use the store; the first keeps the values.
        timeout: Limit of waits that give none.

    Attributes:
        space: As given.
    """

    def __init__(self, link: StoreLink, space: str, members: Sequence[int], timeout: timedelta) -> None:
        super().__init__()
        self._link, self.space, self._members = link, space, tuple(members)
        self._timeout = timeout
        #: The copies that C++ has asked for, kept alive here.
        self._clones: list[HvdlabStore] = []
        #: Set by :meth:`close`; shared with the copies.
        self._closed = threading.Event()

    def _ask(self, operation: str, *keys: str, seconds: float | None = None, **what: Any) -> KeeperAnswer:
        limit = self._timeout.total_seconds() if seconds is None else seconds
        return self._link.ask(
            self._members[0], self._members, self.space, operation, limit, self._closed, keys=keys, **what
        )

    def close(self) -> None:
        """End all waits for values, also those of copies and of C++, with ``AbortedError``; so does each later one. Any thread."""
        # Before the threads wake: one that wakes first would wait on.
        self._closed.set()
        self._link.wake()

    def open(self) -> None:
        """Drop the values of earlier default groups. The rank that keeps the values calls it, once all ranks have met."""
        self._ask("open")

    def set_members(self, members: Sequence[int]) -> None:
        """Let these ranks alone use the store from now on. If the first is another one than before, the values are gone."""
        self._members = tuple(members)
        for copy in self._clones:
            copy.set_members(members)

    @property
    def timeout(self) -> timedelta:
        """Return the limit of waits that give none."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", key, values=(_bytes(value),))

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value. Raises ``DistStoreError`` after the timeout."""
        return self._ask("get", key).values[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins with 0, and return the sum."""
        return self._ask("add", key, amount=amount).amount

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value if the present one is the expected one; a key that is not set counts as empty.

        Returns:
            The value that the key then has; the expected value if the key is still not set.
        """
        return self._ask("compare", key, values=(_bytes(expected_value), _bytes(desired_value))).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value; a key that is not set counts as empty."""
        self._ask("append", key, values=(_bytes(value),))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises ``DistStoreError`` after the timeout."""
        self._ask("wait", *keys, seconds=None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._ask("check", *keys).amount)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was set."""
        return bool(self._ask("delete", key).amount)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask("count").amount

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return list(self._ask("list").keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until several keys are set, and return their values. Raises ``DistStoreError`` after the timeout."""
        return list(self._ask("get", *keys).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        self._ask("set", *keys, values=tuple(_bytes(value) for value in values))

    def has_extended_api(self) -> bool:
        # Gloo asks for this before it fetches the addresses of all ranks by one multi_get, in place of a
        # request for each.
        return True

    def clone(self) -> HvdlabStore:
        """Return another store object with the same values."""
        copy = HvdlabStore(self._link, self.space, self._members, self._timeout)
        copy._closed = self._closed
        self._clones.append(copy)
        return copy

    # Names by which C++ looks for them.
    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys
    setTimeout: Callable[..., None] = set_timeout


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
