"""Finding, or founding, the world for which a launcher other than hvdlab's started this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlab.collectives import addresses, private
from hvdlab.collectives.bootstrap import library, mpi, store
from hvdlab.collectives.bootstrap.board import Board, await_card
from hvdlab.collectives.bootstrap.card import Card
from hvdlab.collectives.bootstrap.directory import Directory
from hvdlab.collectives.bootstrap.job import job_key
from hvdlab.collectives.bootstrap.launchers import Launched, Meeting, detect
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.encryption import require_sealed_rendezvous
from hvdlab.collectives.engine.hosts import host_key
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.planes.base import PlaneAborted
from hvdlab.collectives.protocol.handshake import TlsAddress, parse_address
from hvdlab.collectives.settings import Settings

if TYPE_CHECKING:
    from hvdlab.collectives.bootstrap.keeper import Keeper
    from hvdlab.collectives.coordinator.process import CoordinatorProcess
    from hvdlab.collectives.engine.engine import Engine

_SHORTEST_TOKEN = 16
_CLOSED = "rendezvous closed"
"""Key of the world's store that rank 0 sets once it has closed the rendezvous."""
RENDEZVOUS_DIRECTORY = "HVDLAB_RENDEZVOUS_DIR"


class Found:
    """A world that this process may join any number of times: the coordinator stays until the last rank has gone.

    As long as the rank that started the coordinator lives, and has not released the world, the coordinator has a successor when it
    dies.

    Attributes:
        coordinator: The coordinator, on the rank that started it.
    """

    def __init__(
        self,
        launched: Launched,
        card: Card,
        address: str,
        board: Board,
        coordinator: CoordinatorProcess | None,
    ) -> None:
        self._launched, self._card, self._address = launched, card, address
        self._board = board
        self.coordinator = coordinator
        self._keeper: Keeper | None = None
        self._completed = False
        if coordinator is not None:
            from hvdlab.collectives.bootstrap.keeper import Keeper

            self._keeper = Keeper(coordinator)

    def settings(self, base: Settings) -> Settings:
        """The settings ``base``, with all that is needed to join this world."""
        return dataclasses.replace(
            base,
            coordinator=self._card.address,
            token=self._card.token or base.token,
            certificate=self._card.certificate or None,
            rank=self._launched.rank,
            size=self._launched.size,
            local_rank=self._launched.ordered_local_rank,
            address=self._address,
        )

    def complete(self, engine: Engine) -> None:
        """All ranks are there: remove the card, whose secret is needed no longer.

        The user's code may want the port of the rendezvous next, as ``init_process_group`` does. A rank that connected there before
        rank 0 has closed its store would reach one that is about to end. So each rank waits here until rank 0 has closed it.
        """
        if self._completed:
            return
        self._completed = True
        self._board.withdraw()
        self._board.close()
        if not (isinstance(self._board, store.Store) and self._board.of_rank_0):
            return
        world = engine.world_store()
        if self._launched.rank == 0:
            world.set(_CLOSED, b"1")
            return
        # If the epoch is over, a rank has died in the meantime; the user's next collective says so.
        try:
            world.get(_CLOSED, engine.settings.start_timeout)
        except PlaneAborted:
            pass
        except TimeoutError as error:
            raise StartError(
                f"Rank 0 has not closed {self._board.place}, where the ranks met: {error}"
            ) from error

    def release(self) -> None:
        """This process is done with the world. The coordinator ends after the last rank."""
        self._board.withdraw()
        self._board.close()
        if self._keeper is not None:
            self._keeper.close()
        if self.coordinator is not None:
            self.coordinator.release()


def find(environ: Mapping[str, str], settings: Settings) -> Found | None:
    """The world that a launcher's variables describe; ``None`` if they describe none, or one of a single rank.

    Rank 0 starts the coordinator and returns at once. The other ranks wait until they have read rank 0's card.

    Args:
        environ: The environment.
        settings: Its ``start_timeout`` limits the wait; its ``token``, if the user has given one, seals the card.

    Raises:
        StartError: No coordinator can be started, or is known in time; the text says what is missing.
        InvalidRequestError: Variables contradict each other.
    """
    _refuse_horovodrun(environ)
    launched = detect(environ)
    if launched is None or launched.size == 1:
        return None
    require_long_token(settings.token)
    if not launched.one_host:
        require_sealed_rendezvous(settings.require_encryption, settings.token, launched.launcher.name)
    deadline = Deadline(settings.start_timeout)
    board = _board(launched, environ, deadline)
    try:
        if launched.rank == 0:
            return _found(launched, environ, board, deadline, settings.token)
        card = await_card(board, launched.size, deadline, settings.token)
        return Found(launched, card, _address(environ, card), board, None)
    except BaseException:
        board.close()
        raise


def require_long_token(token: str) -> None:
    """Raise ``InvalidRequestError`` if the secret that the user has given, if any, could be guessed."""
    if token and len(token) < _SHORTEST_TOKEN:
        raise InvalidRequestError(
            f"HVDLAB_TOKEN has {len(token)} characters; give all ranks a random one of {_SHORTEST_TOKEN} at least "
            "(`openssl rand -hex 32`)."
        )


def _refuse_horovodrun(environ: Mapping[str, str]) -> None:
    if environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        raise StartError(
            "Horovod's own horovodrun started this process, and hvdlab does not take part in its rendezvous. Start "
            "the script by `hvdlab run -np 4 python train.py` (it takes horovodrun's options), mpirun, srun or "
            "torchrun."
        )


def _board(launched: Launched, environ: Mapping[str, str], deadline: Deadline) -> Board:
    """The board at which the ranks of this job meet. Every rank must choose the same one."""
    key = job_key(launched, environ)
    if launched.one_host:
        return board_of_host(environ, key)
    given = environ.get(RENDEZVOUS_DIRECTORY)
    if given:
        return Directory([Path(given)], key, shared=True)
    if launched.launcher.meeting is Meeting.MPI and library.works(environ):
        return mpi.Broadcast(launched.rank, launched.size, deadline)
    if store.usable(environ):
        return store.Store(environ, key, serve=launched.rank == 0, deadline=deadline)
    if launched.launcher.meeting is Meeting.STORE:
        raise StartError(
            f"Ranks of several hosts that {launched.launcher.name} started find each other through PyTorch, which is "
            f"not installed: pip install hvdlab[torch], or set {RENDEZVOUS_DIRECTORY} to a directory that all share."
        )
    return Directory([_shared_directory(environ)], key, shared=True)


def board_of_host(environ: Mapping[str, str], key: str) -> Directory:
    """The board of ranks that are all on this host: a file that only their user can write or read."""
    given = environ.get(RENDEZVOUS_DIRECTORY)
    return Directory([Path(given)] if given else private.parents(environ), key, shared=False)


def _shared_directory(environ: Mapping[str, str]) -> Path:
    """Clusters share the home directories, as a rule."""
    cache = environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def _found(
    launched: Launched, environ: Mapping[str, str], board: Board, deadline: Deadline, given: str
) -> Found:
    """Be rank 0: start the coordinator and announce it, or the failure. A secret that was ``given`` is not announced."""
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

    coordinator = None
    secret: dict[str, Any] = {"token": given} if given else {}
    try:
        listen = None if launched.one_host else _own_address(environ)
        coordinator = CoordinatorProcess.start(
            size=launched.size,
            tcp_host=listen,
            linger=True,
            keep=True,
            timeout=deadline.remaining() or 0.0,
            **secret,
        )
        card = Card(
            launched.size,
            host_key(),
            coordinator.address,
            coordinator.tls_address or "",
            coordinator.certificate or "",
            "" if given else coordinator.token,
        )
        board.publish(card.encode(given))
    except HvdlabError as error:
        if coordinator is not None:
            coordinator.close()
        else:
            board.publish(Card(launched.size, error=str(error)).encode(given))
        raise
    except BaseException:
        if coordinator is not None:
            coordinator.close()
        raise
    return Found(launched, card, _address(environ, card), board, coordinator)


def _own_address(environ: Mapping[str, str]) -> str:
    """The address at which other hosts reach rank 0's coordinator."""
    hints = (environ.get("MASTER_ADDR", ""), environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    return addresses.chosen(environ) or addresses.outward(hints)


def _address(environ: Mapping[str, str], card: Card) -> str:
    """The address of this rank's data plane: the environment's choice, or the one from which it reaches the coordinator."""
    chosen = addresses.chosen(environ)
    if chosen or not card.remote:
        return chosen or addresses.LOOPBACK
    remote = parse_address(card.remote)
    assert isinstance(remote, TlsAddress)
    if card.host == host_key():
        return remote.host
    return addresses.towards(remote.host) or addresses.LOOPBACK
