"""The world in which process groups are, and the process sets that a group's members make without the other ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import (
    AbortedError,
    HvdlabError,
    InvalidRequestError,
    StartError,
)
from hvdlab.collectives.rendezvous.backends import DirectoryBackend
from hvdlab.collectives.rendezvous.discovery import CoordinatorInfo, host_backend, require_long_token
from hvdlab.collectives.rendezvous.launchers import detect
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import host_key
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import OpKind
from hvdlab.torch.c10d.call_history import Histories, OptimizerSteps
from hvdlab.torch.c10d.operation_names import is_local
from hvdlab.torch.c10d.store import HvdlabStore, StoreLink
from hvdlab.torch.c10d.watch_options import WatchOptions

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

_ASK, _ANSWER = "c10d.process_set.ask", "c10d.process_set.answer"
_ATTEMPTS = 20
"""How often a process set is requested before its error is raised."""
_NAME_BYTES = 16
"""Random bytes in the name of the file with the coordinator's card."""
_FILE = re.compile(rf"c10d-[0-9a-f]{{{2 * _NAME_BYTES}}}")


class Interruptible(Protocol):
    """A group for whose operations C++ may wait."""

    def interrupted(self) -> None:
        """Give these operations up: the notebook interrupts this rank. Control thread."""


@dataclasses.dataclass
class _AddedSet:
    """A process set that this rank has requested.

    Attributes:
        handle: The handle of the request that adds it.
        processes: The processes of its ranks when it was requested. A set loses a rank that dies, and does not get the rank's
            successor.
        generation: The world's generation when ``processes`` was last compared with the present processes.
    """

    handle: Handle
    processes: tuple[object, ...]
    generation: int


class C10dWorld:
    """Shared state of this process's groups. One object for each engine, kept beside it.

    Args:
        engine: The engine.

    Attributes:
        founded: Whether the world was made only for the default group.
        ranks: The world's ranks by their numbers in the default group, which torch calls global ranks: a world that has lost a rank has a
            gap in its numbers. Empty if the default group is not hvdlab's, and has the numbers of the world.
        link: This rank's end of the default group's store.
        store: The default group's store, if that is not one of torch's; kept here since C++ does not keep it alive.
        histories: The last calls of each group.
        steps: The count of steps that this rank's optimizers have taken.
        watch: How the default group is watched, and groups without options of their own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.founded = False
        self.ranks: tuple[int, ...] = ()
        self.link = StoreLink(engine)
        self.store: HvdlabStore | None = None
        self.histories = Histories(engine)
        self.steps = OptimizerSteps()
        self.watch = WatchOptions()
        #: Groups for whose operations C++ may wait; guarded by the lock, since a set must not change while it
        #: is copied.
        self._with_futures: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._groups_lock = threading.Lock()
        engine.on_native_waits(self._on_interrupt)
        #: Guards the sets: a user's thread, and the control thread for another rank, must not request one
        #: twice.
        self._registering = threading.Lock()
        #: The process sets that this rank has requested, by their ranks.
        self._sets: dict[tuple[int, ...], _AddedSet] = {}
        #: How many groups of these ranks were made by their members alone.
        self._made_alone: Counter[tuple[int, ...]] = Counter()
        #: Guards the answers; notified when one has come, or the world has lost a rank that does not answer
        #: any more.
        self._answered = threading.Condition()
        #: The ranks that have answered that they have requested a set, since this rank last asked them to.
        self._answers: dict[tuple[int, ...], set[int]] = {}
        #: The sets for which threads of this rank wait for answers, by a key of each wait.
        self._questions: dict[object, tuple[int, ...]] = {}
        engine.on_world(self._on_world)
        engine.on_reconnected(self._ask_again)
        engine.on_mail(_ASK, self._on_ask)
        engine.on_mail(_ANSWER, self._on_answer)

    def add(self, group: Interruptible) -> None:
        """Call the group's ``interrupted()`` when the notebook interrupts this rank, for as long as there is the group."""
        with self._groups_lock:
            self._with_futures.add(group)

    def _on_interrupt(self) -> None:
        with self._groups_lock:
            groups = list(self._with_futures)
        for group in groups:
            group.interrupted()

    def members(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the world's ranks that have these numbers in the default group."""
        return tuple(self.ranks[number] for number in numbers) if self.ranks else tuple(numbers)

    def numbers(self, members: Sequence[int]) -> list[int]:
        """Return the numbers that these ranks of the world have in the default group."""
        return [self.ranks.index(member) for member in members] if self.ranks else list(members)

    def process_set(self, members: Sequence[int]) -> int:
        """Return the process set of these ranks, which only they call for. Waits until the core has added it.

        Sets are kept: groups of the same ranks, and groups that are made again, share one.

        Returns:
            The set's id; 0 for all ranks of the world.

        Raises:
            AbortedError: The request was aborted again and again, as by ranks that die or are interrupted.
            StartError: A rank of the world did not answer within the start timeout.
        """
        engine, ranks = self.engine, tuple(sorted(members))
        if ranks == tuple(sorted(engine.ranks())):
            return 0
        for attempt in range(_ATTEMPTS):
            if not self._is_added(ranks):
                self._let_others_ask(ranks)
            try:
                return self._register(ranks).wait().process_set
            except (
                AbortedError
            ):  # the generation ended for another reason, such as an interrupt of another rank
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _let_others_ask(self, ranks: tuple[int, ...]) -> None:
        """Wait until all other ranks of the world have requested this set: the core adds it once all ranks have.

        Their control threads do so when this rank's mail comes, regardless of their users' work. This rank requests the set only
        after that: the coordinator would fail its request while a rank whose cell has ended is missing.
        """
        engine = self.engine
        waiting = set(engine.ranks()) - {engine.rank}
        deadline = Deadline(engine.settings.start_timeout)
        question = object()
        try:
            with self._answered:
                # Before the question is sent: answers to an earlier one don't count, and a reconnection sends it
                # again from now on.
                self._answers.pop(ranks, None)
                self._questions[question] = ranks
            engine.post(_ASK, _encoded(ranks), sorted(waiting))
            with self._answered:
                while left := waiting & set(engine.living) - self._answers.get(ranks, set()):
                    if not self._answered.wait(deadline.remaining()) and deadline.expired:
                        raise StartError(
                            f"{format_ranks(sorted(left))} did not answer, so that no group can be made."
                        )
        finally:
            with self._answered:
                self._questions.pop(question, None)

    def _ask_again(self) -> None:
        """Ask the ranks again that have not answered: the coordinator may have died with the question or an answer. Control thread."""
        others = set(self.engine.living) - {self.engine.rank}
        with self._answered:
            missing = {ranks: others - self._answers.get(ranks, set()) for ranks in self._questions.values()}
        for ranks, silent in missing.items():
            if silent:  # mail to no ranks would go to all clients
                self.engine.post(_ASK, _encoded(ranks), sorted(silent))

    def name_in_core(self, name: str, members: tuple[int, ...]) -> str:
        """Return the core's name for the operations of a group that is being made: the same on all members.

        Args:
            name: Torch's name of the group.
            members: Its ranks.
        """
        if not is_local(name):
            return f"c10d.{name}"
        # Members make their groups in one order, so this count is equal on all of them; torch's hash need not
        # be.
        self._made_alone[members] += 1
        return f"c10d.{','.join(map(str, members))}.{self._made_alone[members]}"

    def _register(self, ranks: tuple[int, ...], *, internal: bool = False) -> Handle:
        with self._registering:
            added = self._sets.get(ranks)
            if added is None or (added.handle.done() and not self._is_there(ranks, added)):
                name = f"process_set.add.{','.join(map(str, ranks))}"
                site = "dist.new_group"
                request = Request(OpKind.ADD_PROCESS_SET, name, ranks=ranks, site=site, internal=internal)
                # Read before the request: a successor that came in between would otherwise count as the
                # process that the set has.
                generation, processes = self._processes(ranks)
                added = self._sets[ranks] = _AddedSet(self.engine.submit(request), processes, generation)
            return added.handle

    def _processes(self, ranks: tuple[int, ...]) -> tuple[int, tuple[object, ...]]:
        """Return the world's generation, and the processes that are these ranks in this generation."""
        generation, processes = self.engine.processes()
        return generation, tuple(process for process in processes if process[0] in ranks)

    def _is_there(self, ranks: tuple[int, ...], added: _AddedSet) -> bool:
        """Return whether a set was added and its ranks are still the same processes. All ranks of the world come to the same answer."""
        result, _ = added.handle.outcome()
        if result is None or not self.engine.knows_process_set(result.process_set):
            return False
        if added.generation != self.engine.generation():
            generation, processes = self._processes(ranks)
            if processes != added.processes:
                return False
            added.generation = generation
        return True

    def _is_added(self, ranks: tuple[int, ...]) -> bool:
        """Return whether this rank has requested the set, and the set was added."""
        with self._registering:
            added = self._sets.get(ranks)
            return added is not None and added.handle.done() and self._is_there(ranks, added)

    def _on_world(self) -> None:
        """Wake the threads that wait for answers: a rank that they wait for may be gone. Control thread."""
        with self._answered:
            self._answered.notify_all()

    def _on_ask(self, sender: int, body: bytes) -> None:
        """Request a set that another rank needs, and then answer. Control thread."""
        self._register(_decoded(body), internal=True)
        # Announced before the answer, upon which the asking rank requests the set: the coordinator must not find
        # this rank missing.
        self.engine.flush()
        self.engine.post(_ANSWER, body, [sender])

    def _on_answer(self, sender: int, body: bytes) -> None:
        """Record that the sender has requested a set: it did so before it answered. Control thread."""
        with self._answered:
            self._answers.setdefault(_decoded(body), set()).add(sender)
            self._answered.notify_all()


def _encoded(ranks: tuple[int, ...]) -> bytes:
    return ",".join(map(str, ranks)).encode()


def _decoded(body: bytes) -> tuple[int, ...]:
    return tuple(map(int, body.split(b",")))


def world_of_group(store: Any, rank: int, size: int) -> C10dWorld:
    """Return the world for the default group: a pool's or a launcher's, or one that rank 0 founds.

    Args:
        store: Torch's store, in which rank 0 names the file with the address of a coordinator that it starts.
        rank: This rank's number in the default group.
        size: Number of its ranks.

    Raises:
        StartError: There is no coordinator, and none can be started or reached.
        InvalidRequestError: hvdlab's world has other ranks than the group.
    """
    if context.is_initialized():
        current = context.companion(C10dWorld)
        if current.founded and (current.engine.rank, len(current.engine.ranks())) != (rank, size):
            context.shutdown()  # only a former default group has used that world
    settings = context.take_settings()  # also after hvd.init() took the secret out of the environment
    if size > 1 and not context.is_initialized() and not _has_launcher(settings):
        world = _founded(store, rank, size, settings)
    else:
        engine = context.init()
        require_whole_world(engine, rank, size)
        world = context.companion(C10dWorld)
    # Behind this barrier ranks send each other mail about groups. Mail to a rank without a C10dWorld would be lost, so all wait until
    # each rank has made its own.
    world.engine.run(Request(OpKind.BARRIER, "init_process_group.ready"))
    return world


def require_whole_world(engine: Engine, rank: int, size: int) -> None:
    """Raise ``InvalidRequestError`` if the default group has another rank or size than the world; -1 stands for not given.

    The rank may be that in the world, or its position there, which torch needs: a world that has lost a rank has a gap in its numbers.
    """
    own, ranks = engine.rank, engine.ranks()
    if rank not in (-1, own, ranks.index(own)) or size not in (-1, len(ranks)):
        raise InvalidRequestError(
            f"This process is rank {own} of {len(ranks)} in hvdlab's world, and rank {rank} of {size} in the "
            "default process group: give init_process_group no rank and world_size, or the same ones."
        )


def current_world() -> C10dWorld:
    """Return the world of the default group. Raises ``NotInitializedError`` if hvdlab was shut down since it was made."""
    return context.companion(C10dWorld, 'dist.new_group(backend="hvdlab")')


def has_coordinator(settings: Settings) -> bool:
    """Return whether this process is a rank of a pool, or of a job of ``hvdlab run``."""
    return context.in_rank_of_pool() or settings.coordinator is not None


def _has_launcher(settings: Settings) -> bool:
    """Return whether ``hvd.init`` finds a world by itself: that of a pool, of ``hvdlab run`` or of torchrun, also on several hosts."""
    if has_coordinator(settings):
        return True
    launched = detect(os.environ)
    return launched is not None and launched.launcher.name == "torchrun"


def _founded(store: Any, rank: int, size: int, settings: Settings) -> C10dWorld:
    """Join a new world: rank 0 starts its coordinator, and gives the others the place of its card.

    Torch's store is open to all users of the host, which can change its contents. So it has only the random name of a file that
    none but this user can make or read; the card in that file has the coordinator's address and secret.
    """
    require_long_token(settings.token)
    key = f"hvdlab.world.{context.next_world()}"  # the launcher's store may outlive this world
    started = _start(store, key, size, settings) if rank == 0 else None
    try:
        card = _read_card(store, key, rank, settings.token)
        joining = dataclasses.replace(
            settings, coordinator=card.address, token=card.token or settings.token, rank=rank, size=size
        )
        # All ranks are on this host, or the card would have had no address for them.
        context.init(
            dataclasses.replace(joining, local_rank=rank, local_size=size, cross_rank=0, cross_size=1)
        )
    finally:
        if started is not None:
            coordinator, board = started
            board.withdraw()  # all ranks have joined, or the start has failed
            coordinator.release()  # it ends after the last rank
    world = context.companion(C10dWorld)
    world.founded = True
    return world


def _read_card(store: Any, key: str, rank: int, secret: str) -> CoordinatorInfo:
    """Wait for rank 0's card. Raises ``StartError`` if there is none to trust, or rank 0 could not start the coordinator."""
    shown = CoordinatorInfo.decode(bytes(store.get(key)), secret)
    if shown.error:
        raise StartError(f"Rank 0 could not start the coordinator: {shown.error}")
    if shown.host != host_key():
        raise StartError(
            f"Rank {rank} is on another host than rank 0: over several hosts, start the ranks by `hvdlab run` or torchrun."
        )
    if not _FILE.fullmatch(shown.file):
        raise StartError(
            "Torch's store has an announcement that is not rank 0's: it names no file of hvdlab's. All users of this host can write "
            "into the store at MASTER_PORT; take another port, or start the ranks by `hvdlab run`."
        )
    board = host_backend(os.environ, shown.file)
    data = board.read(0)  # rank 0 has written it before it wrote to the store
    if data is None:
        raise StartError(
            f"Torch's store names a card that is not in {board.place}: it has ended, or another user has written its name. {board.advice}"
        )
    return CoordinatorInfo.decode(data, secret)


def _start(
    store: Any, key: str, size: int, settings: Settings
) -> tuple[CoordinatorProcess, DirectoryBackend]:
    """Start the coordinator, and show the other ranks its card, without a secret that the user has given to all of them."""
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

    given = settings.token
    board = host_backend(os.environ, f"c10d-{secrets.token_hex(_NAME_BYTES)}")
    coordinator = None
    try:
        try:
            secret: dict[str, Any] = {"token": given} if given else {}
            coordinator = CoordinatorProcess.start(
                size=size, linger=True, timeout=settings.start_timeout, **secret
            )
            card = CoordinatorInfo(
                size, host_key(), coordinator.address, token="" if given else coordinator.token
            )
            board.publish(card.encode(given))
        except HvdlabError as error:
            # The other ranks wait in the store for this key: they end with the reason now, and not at the
            # store's timeout.
            store.set(key, CoordinatorInfo(size, error=str(error)).encode(given))
            raise
        # After the card: a rank that gets the file's name from the store reads the file at once.
        store.set(key, CoordinatorInfo(size, host_key(), file=board.key).encode(given))
    except BaseException:  # torch's store may be gone, or the user interrupts: no rank will come for the card
        board.withdraw()
        if coordinator is not None:
            coordinator.close()
        raise
    return coordinator, board
