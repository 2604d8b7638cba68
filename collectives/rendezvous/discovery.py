"""Discovery of the world for which a launcher other than hvdlab's started this process.

Rank 0 starts the coordinator and publishes its :class:`CoordinatorInfo`: addresses, and the secret for ranks. The others wait for it.
"""

from __future__ import annotations

import dataclasses
import hmac
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hvdlab.collectives import system
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.planes.base import PlaneAborted
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.collectives.protocol.endpoint import client_context, require_same_certificate
from hvdlab.collectives.protocol.handshake import (
    TlsAddress,
    UnixAddress,
    parse_address,
    require_sealed_rendezvous,
)
from hvdlab.collectives.rendezvous import backends
from hvdlab.collectives.rendezvous.backends import DirectoryBackend, RendezvousBackend
from hvdlab.collectives.rendezvous.launchers import Launched, Meeting, detect, job_key
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import host_key, require_own_peer
from hvdlab.collectives.time_limits import Deadline

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.process import CoordinatorProcess
    from hvdlab.collectives.engine.engine import Engine
    from hvdlab.collectives.failover.supervisor import Keeper

PROBE_SECONDS = 5.0
"""Seconds for one try to reach a published coordinator, at most."""


class CoordinatorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and secret of a job's coordinator, which rank 0 publishes for the other ranks.

    Attributes:
        size: Number of ranks of the job.
        host: The coordinator's host, as :func:`~hvdlab.collectives.system.host_key` has it.
        local: Its address for ranks of that host (``unix:/path``).
        remote: Its address for all others (``tls:host:port``), or empty.
        certificate: PEM text that goes with ``remote``.
        token: Its secret for ranks; empty if the user has given them one.
        error: Why rank 0 could not start it, or empty.
        file: Name of the file in the user's private directory that has everything, for ranks of this host; empty if this does.
        seal: Proof that the process that wrote this knows the user's secret; empty if the user has given none.
    """

    size: int
    host: str = ""
    local: str = ""
    remote: str = ""
    certificate: str = ""
    token: str = ""
    error: str = ""
    file: str = ""
    seal: str = ""

    def encode(self, secret: str = "") -> bytes:
        """Return the bytes to publish, sealed if the user has given a secret."""
        return msgspec.json.encode(msgspec.structs.replace(self, seal=self._seal(secret) if secret else ""))

    def _seal(self, secret: str) -> str:
        bare = msgspec.json.encode(msgspec.structs.replace(self, seal=""))
        return hmac.digest(secret.encode(), b"hvdlab card\0" + bare, "sha256").hex()

    @classmethod
    def decode(cls, data: bytes, secret: str = "") -> CoordinatorInfo:
        """Decode published bytes. Raises ``StartError`` if they can't be read, or are not sealed with the secret that the user has given."""
        try:
            info = msgspec.json.decode(data, type=cls)
        except MALFORMED as error:
            raise StartError(f"Rank 0 has announced something that can't be read: {error}") from error
        # Before anything of it is used: other processes that can write there could name a coordinator of their own.
        if secret and not hmac.compare_digest(info.seal.encode(), info._seal(secret).encode()):
            raise StartError(
                "What is announced as the coordinator is not sealed with this rank's HVDLAB_TOKEN: rank 0 was given another "
                "one or none, or somebody else has written it."
            )
        if info.seal and not secret:
            raise StartError(
                "Rank 0 was given HVDLAB_TOKEN, and this rank was not; give all of them the same."
            )
        return info

    @property
    def address(self) -> str:
        """Return the coordinator's address for this process.

        Raises:
            StartError: It can't be reached from this host.
        """
        if self.host == host_key():
            return self.local
        if not self.remote:
            raise StartError(
                f"Rank 0 runs on {self.host} and expects all ranks there, but this one runs on {host_key()}: the "
                "launcher's variables say that there is one host only. If these are containers of one machine, let "
                "them share it, or unset the launcher's count of ranks per host."
            )
        return self.remote

    def answers(self, timeout: float) -> bool:
        """Return whether this coordinator runs, and is not one of a job that has ended."""
        try:
            _probe(self.address, self.certificate, min(timeout, PROBE_SECONDS))
        except (OSError, HvdlabError) as error:
            # An address that can't be read is a fault of its writer, not a coordinator that has ended.
            if isinstance(error, InvalidRequestError):
                raise
            return False
        return True


def _probe(address: str, certificate: str, timeout: float) -> None:
    where = parse_address(address)
    if isinstance(where, UnixAddress):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(where.path)
            # The path of a job that has ended can be another user's by now.
            require_own_peer(sock)
        return
    assert isinstance(where, TlsAddress)
    with (
        socket.create_connection((where.host, where.port), timeout) as plain,
        client_context(certificate).wrap_socket(plain) as secure,
    ):
        require_same_certificate(secure, certificate)


_LOOK_SECONDS = 1.0
"""Seconds of one read of the backend."""
LEFTOVER_SECONDS = 10.0
"""Seconds in which rank 0 replaces what an earlier job has left in its place: it starts its coordinator first."""


def await_info(
    backend: RendezvousBackend, size: int, deadline: Deadline, secret: str = ""
) -> CoordinatorInfo:
    """Wait for the information about a coordinator that runs. If an earlier job has left its own, that is passed over.

    Information that was there before this rank came is perhaps such a leftover, also if it reports a failure or has another seal. It is
    believed only once rank 0 has had time to replace it.

    Args:
        backend: The backend by which rank 0 publishes it.
        size: Number of ranks of the job.
        deadline: Limit for the wait.
        secret: The secret that the user has given to all ranks, if any; the information must be sealed with it.

    Raises:
        StartError: There is none in time, rank 0 reports that it could not start, or the seal is wrong.
    """
    old: bytes | None = None
    refusal: StartError | None = None
    believed = Deadline(LEFTOVER_SECONDS)
    looked = False
    while not deadline.expired and (refusal is None or not believed.expired):
        left = deadline.remaining() or 0.0
        # The first look finds a leftover without a wait: whatever comes after it is of this job.
        data = backend.read(min(left, _LOOK_SECONDS) if looked else 0.0)
        if data is not None and data != old:
            try:
                info = _accepted(data, size, secret, backend)
                if info.address and info.answers(left):
                    return info
            except StartError as error:
                if looked:
                    raise
                refusal = error
            # Of a job that has ended, as a rule; rank 0 publishes its own in this place.
            old = data
        elif data is not None:
            backend.pause(min(left, believed.remaining() or left))
        looked = True
    if refusal is not None:
        raise refusal
    ended = "" if old is None else " (one that is there is of a coordinator that does not answer from here)"
    raise StartError(
        f"Rank 0 has not said where the coordinator is within {deadline.seconds:g} s{ended}: it has not come to "
        f"hvd.init(), or has ended. Looked in {backend.place}. {backend.advice}"
    )


def _accepted(data: bytes, size: int, secret: str, backend: RendezvousBackend) -> CoordinatorInfo:
    """Return published information. Raises ``StartError`` if this job's ranks can't use it, or it reports that rank 0 has failed."""
    info = CoordinatorInfo.decode(data, secret)
    if info.error:
        raise StartError(f"Rank 0 could not start the coordinator: {info.error}")
    if info.size != size:
        raise StartError(
            f"Rank 0's job has {info.size} ranks, this one {size}: two jobs use one {backend.place}."
        )
    return info


_SHORTEST_TOKEN = 16
"""Characters that a secret of the user's has at least; a shorter one could be guessed."""
_CLOSED = "rendezvous closed"
"""Key of the world's store that rank 0 sets once it has closed the rendezvous."""
RENDEZVOUS_DIRECTORY = "HVDLAB_RENDEZVOUS_DIR"


class DiscoveredWorld:
    """World that this process may join any number of times: the coordinator stays until the last rank has gone.

    As long as the rank that started the coordinator lives, and has not released the world, the coordinator has a successor when it
    dies.

    Attributes:
        coordinator: The coordinator, on the rank that started it.
    """

    def __init__(
        self,
        launched: Launched,
        info: CoordinatorInfo,
        address: str,
        backend: RendezvousBackend,
        coordinator: CoordinatorProcess | None,
    ) -> None:
        self._launched, self._info, self._address = launched, info, address
        self._backend = backend
        self.coordinator = coordinator
        self._keeper: Keeper | None = None
        self._completed = False
        if coordinator is not None:
            from hvdlab.collectives.failover.supervisor import Keeper

            self._keeper = Keeper(coordinator)

    def settings(self, base: Settings) -> Settings:
        """Return the settings ``base``, with all that is needed to join this world."""
        return dataclasses.replace(
            base,
            coordinator=self._info.address,
            # The published one is empty where the user has given all ranks the secret.
            token=self._info.token or base.token,
            certificate=self._info.certificate or None,
            rank=self._launched.rank,
            size=self._launched.size,
            local_rank=self._launched.ordered_local_rank,
            address=self._address,
        )

    def complete(self, engine: Engine) -> None:
        """Withdraw the published secret: all ranks are there.

        The user's code may bind the port of the rendezvous next, as ``init_process_group`` does. A rank that connected there before
        rank 0 has closed its store would reach one that is about to end. So each rank waits here until rank 0 has closed it.
        """
        if self._completed:
            return
        self._completed = True
        self._backend.withdraw()
        self._backend.close()
        if not (isinstance(self._backend, backends.TcpStoreBackend) and self._backend.of_rank_0):
            return
        # Not of the present generation, which can be another one than rank 0's.
        world = engine.first_store()
        if self._launched.rank == 0:
            # After the close: a rank that reads this can use the port of the rendezvous at once.
            world.set(_CLOSED, b"1")
            return
        # If the generation is over, a rank has died in the meantime; the user's next collective raises it.
        try:
            world.get(_CLOSED, engine.settings.start_timeout)
        except PlaneAborted:
            pass
        except TimeoutError as error:
            raise StartError(
                f"Rank 0 has not closed {self._backend.place}, where the ranks met: {error}"
            ) from error

    def release(self) -> None:
        """Release the world. The coordinator ends after the last rank."""
        self._backend.withdraw()
        self._backend.close()
        if self._keeper is not None:
            # First: a keeper that still watches would take the end of the released coordinator for a death, and start a successor.
            self._keeper.close()
        if self.coordinator is not None:
            self.coordinator.release()


def discover(environ: Mapping[str, str], settings: Settings) -> DiscoveredWorld | None:
    """Return the world that a launcher's variables describe; ``None`` if they describe none, or one of a single rank.

    Rank 0 starts the coordinator and returns at once. The other ranks wait until they have read the information that it publishes.

    Args:
        environ: The environment.
        settings: Its ``start_timeout`` limits the wait; its ``token``, if the user has given one, seals that information.

    Raises:
        StartError: No coordinator can be started, or is known in time; the text names the missing part.
        InvalidRequestError: Variables contradict each other.
    """
    _refuse_horovodrun(environ)
    launched = detect(environ)
    if launched is None or launched.size == 1:
        return None
    require_long_token(settings.token)
    if not launched.one_host:
        require_sealed_rendezvous(settings.require_encryption, settings.token, launched.launcher.name)
    # One limit for all steps: opening torch's store, or MPI, waits for other ranks as well.
    deadline = Deadline(settings.start_timeout)
    backend = _backend(launched, environ, deadline)
    try:
        if launched.rank == 0:
            return _start_and_publish(launched, environ, backend, deadline, settings.token)
        info = await_info(backend, launched.size, deadline, settings.token)
        return DiscoveredWorld(launched, info, _address(environ, info), backend, None)
    except BaseException:
        backend.close()
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


def _backend(launched: Launched, environ: Mapping[str, str], deadline: Deadline) -> RendezvousBackend:
    """Return the backend by which the ranks of this job meet. Every rank must choose the same one."""
    key = job_key(launched, environ)
    if launched.one_host:
        return host_backend(environ, key)
    given = environ.get(RENDEZVOUS_DIRECTORY)
    if given:
        return DirectoryBackend([Path(given)], key, shared=True)
    if launched.launcher.meeting is Meeting.MPI and backends.mpi_works(environ):
        return backends.MpiBackend(launched.rank, launched.size, deadline)
    if backends.store_usable(environ):
        return backends.TcpStoreBackend(environ, key, serve=launched.rank == 0, deadline=deadline)
    if launched.launcher.meeting is Meeting.STORE:
        raise StartError(
            f"Ranks of several hosts that {launched.launcher.name} started find each other through PyTorch, which is "
            f"not installed: pip install hvdlab[torch], or set {RENDEZVOUS_DIRECTORY} to a directory that all share."
        )
    return DirectoryBackend([_shared_directory(environ)], key, shared=True)


def host_backend(environ: Mapping[str, str], key: str) -> DirectoryBackend:
    """Return the backend of ranks that are all on this host: a file that only their user can write or read."""
    given = environ.get(RENDEZVOUS_DIRECTORY)
    return DirectoryBackend([Path(given)] if given else system.private_parents(environ), key, shared=False)


def _shared_directory(environ: Mapping[str, str]) -> Path:
    """Return a directory in the home directory, which clusters share as a rule."""
    cache = environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def _start_and_publish(
    launched: Launched, environ: Mapping[str, str], backend: RendezvousBackend, deadline: Deadline, given: str
) -> DiscoveredWorld:
    """Start the coordinator, on rank 0, and publish it, or the failure. A secret that was ``given`` is not published."""
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

    coordinator = None
    secret: dict[str, Any] = {"token": given} if given else {}
    try:
        listen = None if launched.one_host else _own_address(environ)
        coordinator = CoordinatorProcess.start(
            size=launched.size,
            tcp_host=listen,
            # The coordinator outlives rank 0, so that the other ranks learn of its death as of any other's.
            linger=True,
            keep=True,
            timeout=deadline.remaining() or 0.0,
            **secret,
        )
        info = CoordinatorInfo(
            launched.size,
            host_key(),
            coordinator.address,
            coordinator.tls_address or "",
            coordinator.certificate or "",
            "" if given else coordinator.token,
        )
        backend.publish(info.encode(given))
    except HvdlabError as error:
        if coordinator is not None:
            coordinator.close()
        else:
            # Without it the other ranks would wait until their deadline.
            backend.publish(CoordinatorInfo(launched.size, error=str(error)).encode(given))
        raise
    except BaseException:
        if coordinator is not None:
            coordinator.close()
        raise
    return DiscoveredWorld(launched, info, _address(environ, info), backend, coordinator)


def _own_address(environ: Mapping[str, str]) -> str:
    """Return the address at which other hosts reach rank 0's coordinator."""
    hints = (environ.get("MASTER_ADDR", ""), environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    return system.chosen_address(environ) or system.outward_address(hints)


def _address(environ: Mapping[str, str], info: CoordinatorInfo) -> str:
    """Return the address of this rank's data plane: the environment's choice, or the one from which it reaches the coordinator."""
    chosen = system.chosen_address(environ)
    if chosen or not info.remote:
        return chosen or system.LOOPBACK
    remote = parse_address(info.remote)
    assert isinstance(remote, TlsAddress)
    if info.host == host_key():
        return remote.host
    return system.address_towards(remote.host) or system.LOOPBACK
