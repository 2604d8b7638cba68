"""What a rank knows of the world and of its process sets."""

from __future__ import annotations

from hvdlab.collectives.engine.hosts import Place, place
from hvdlab.collectives.engine.locked_state import GuardedState
from hvdlab.collectives.errors import Cause
from hvdlab.collectives.planes.links import Links, plane_text
from hvdlab.collectives.settings import Settings


class Groups:
    """The world and the process sets, as the coordinator last configured them on this rank. Any thread.

    Attributes:
        rank: This rank.
        settings: The settings that the rank was started with.
    """

    def __init__(self, rank: int, settings: Settings, guarded: GuardedState) -> None:
        self.rank, self.settings = rank, settings
        self._guarded = guarded
        self._place: tuple[int, Place] | None = None

    @property
    def size(self) -> int:
        """Living members of the world."""
        return len(self.ranks()) or 1

    def ranks(self, process_set: int = 0) -> tuple[int, ...]:
        """Ranks of a process set's members, by position; empty if this rank does not know it."""
        group = self._guarded.state.sets.get(process_set)
        return group.ranks if group is not None else ()

    def epoch(self) -> int:
        """The world's epoch: as long as it is the same, so are the world's members."""
        group = self._guarded.state.sets.get(0)
        return group.epoch if group is not None else -1

    @property
    def failure(self) -> Cause | None:
        """Why this rank's attempt at elastic training has failed, so that all it submits fails, until the ranks begin again."""
        return self._guarded.state.failure

    def processes(self) -> tuple[int, tuple[tuple[int, str, int], ...]]:
        """The world's epoch, and its members' processes as (rank, host, process id). A rank that was replaced has another process."""
        group = self._guarded.state.sets.get(0)
        if group is None:
            return -1, ()
        return group.epoch, tuple((member.rank, member.host, member.pid) for member in group.members)

    def plane(self, process_set: int = 0) -> str:
        """Name of the data plane of a process set; empty if this rank does not know it."""
        group = self._guarded.state.sets.get(process_set)
        return group.plane if group is not None else ""

    def plane_text(self, process_set: int = 0) -> str:
        """The data plane, with the size of its chunks once that was measured: ``shm in chunks of 512 KiB``."""
        group = self._guarded.state.sets.get(process_set)
        return plane_text(group.plane, group.chunk_bytes) if group is not None else ""

    def device_plane(self, process_set: int, device: str) -> str:
        """Name of the data plane for tensors on a device class; empty if there is none: stage them through the host.

        The plane may be gone in the next epoch, if that has other members; what was submitted for it then fails with
        ``InvalidRequestError`` on all ranks.
        """
        group = self._guarded.state.sets.get(process_set)
        return group.device_planes.get(device, "") if group is not None else ""

    def device_planes(self, process_set: int = 0) -> tuple[str, ...]:
        """Names of the data planes for tensors that are not on the host."""
        group = self._guarded.state.sets.get(process_set)
        return tuple(group.device_planes.values()) if group is not None else ()

    def links(self, process_set: int = 0) -> Links:
        """What the data of CUDA tensors goes over to the other ranks; empty until these have joined the plane for CUDA tensors."""
        group = self._guarded.state.sets.get(process_set)
        return group.links if group is not None else {}

    def planes(self, process_set: int = 0) -> tuple[str, ...]:
        """The data plane, or what the hierarchical one consists of: the plane within hosts and that between them."""
        group = self._guarded.state.sets.get(process_set)
        if group is None:
            return ()
        if group.plane != "hierarchical":
            return (group.plane,)
        return group.options.get("inner", "shm"), group.options.get("outer", "gloo")

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Ids of the process sets that this rank knows, and their ranks."""
        return {id: group.ranks for id, group in dict(self._guarded.state.sets).items()}

    def knows_process_set(self, process_set: int) -> bool:
        """Whether a process set that was added is still there, whether this rank is in it or not.

        One that was being added or removed when the coordinator died may be gone once there is a successor.
        """
        return process_set in self._guarded.state.memory.sets

    def added_process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each process set that was added and is still there, by id; also of those without this rank."""
        return dict(self._guarded.state.memory.sets)

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this host."""
        given = self.settings.local_rank
        return self._where().local_rank if given is None else given

    def local_rank_in(self, process_set: int) -> int:
        """Position among those ranks of this host that are in a process set to which this rank belongs."""
        group = self._guarded.state.sets[process_set]
        return place(self.rank, group.ranks, [member.host for member in group.members]).local_rank

    @property
    def local_size(self) -> int:
        """Living ranks of this host."""
        return self._where().local_size

    @property
    def cross_rank(self) -> int:
        """Position among the hosts that have a rank with this local rank."""
        given = self.settings.cross_rank
        return self._where().cross_rank if given is None else given

    @property
    def cross_size(self) -> int:
        """Number of the hosts that have a rank with this local rank."""
        return self._where().cross_size

    def _where(self) -> Place:
        group = self._guarded.state.sets.get(0)
        if group is None or group.index < 0:
            return Place(0, 1, 0, 1)
        if self._place is None or self._place[0] != group.epoch:
            hosts = [member.host for member in group.members]
            self._place = (group.epoch, place(self.rank, group.ranks, hosts))
        return self._place[1]
