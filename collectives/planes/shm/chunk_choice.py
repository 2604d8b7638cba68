"""Which size of chunks suits the machine and what else runs on it: measured within the first large allreduces of an epoch.

Smaller chunks stay in the caches, larger ones let members wait for each other less often. What is best depends on the sizes of the caches, on how fast
a core runs Python, and on how many members share a core. So the first pieces of :data:`TRIAL_BYTES` bytes
that are reduced, :data:`ROUNDS` for each size, have chunks of different sizes by turns, and all after them have the size with the shortest trial. These pieces are reduced all the same, so
the measurement costs a barrier for each of them.

All members must cut alike. Each declares how long a trial took it, and all use the longest time that a member declared, so all choose the same. That is
also why an epoch does not begin with what was measured in another one, or by an earlier job: a member that came since would not know it.
"""

from __future__ import annotations

from hvdlab.collectives.planes.shm.layout import CHUNK_BYTES, PAIR_CHUNK_BYTES

TRIAL_BYTES = 8 * 1024 * 1024
ROUNDS = 3
"""How often each size is tried. The first time it may find memory that was not touched before, or other work on a core."""
LEAST_GAIN = 0.03
"""By which part of the default's time another size has to be faster."""


def default_chunk(members: int) -> int:
    """Bytes of a chunk, as long as nothing was measured."""
    return PAIR_CHUNK_BYTES if members == 2 else CHUNK_BYTES


class ChunkChoice:
    """The choice of one member; equal on all.

    Args:
        members: Members of the group.
        slot_bytes: Size of a slot: larger chunks are not tried.
    """

    def __init__(self, members: int, slot_bytes: int) -> None:
        self._default = min(default_chunk(members), slot_bytes)
        sizes = [
            size for size in (self._default // 2, self._default, self._default * 2) if size <= slot_bytes
        ]
        # Nothing is tried with many members (:data:`layout.FEW`), or where slots are smaller than by default since a test or a benchmark asks for it.
        self._sizes = sizes if len(sizes) == 3 else []
        self._best: dict[int, int] = {}
        self._trials = 0
        #: Bytes of a chunk: the default until all trials are over.
        self.chosen = self._default

    @property
    def candidate(self) -> int | None:
        """The size to try next, in bytes; ``None`` if there is nothing left to try."""
        if self._trials == ROUNDS * len(self._sizes):
            return None
        return self._sizes[self._trials % len(self._sizes)]

    def measured(self, nanoseconds: int) -> None:
        """What the trial of :attr:`candidate` took the slowest member."""
        size = self.candidate
        assert size is not None
        self._best[size] = min(nanoseconds, self._best.get(size, nanoseconds))
        self._trials += 1
        if self.candidate is None:
            fastest = min(self._best, key=self._best.__getitem__)
            if self._best[fastest] < (1 - LEAST_GAIN) * self._best[self._default]:
                self.chosen = fastest
