"""Much output, and little room for it: trials in which all work continues, and the price of it."""

from __future__ import annotations

import os
import resource
import subprocess

import psutil

from chaos.campaign import Sink
from chaos.pieces import Pieces
from hvdlab.kernel_ext.wire.cells import Chunk, Stream

FLOOD = 100_000_000
"""Bytes that a rank writes; the deeds ``flood`` of victims write as many as the order's ``bytes`` says."""
LINE = "x" * 79 + "\n"
ROOM = 1 << 20
"""Bytes that a file of the notebook's process may have, where the disk is to be full."""
GROWTH = 150 << 20
"""Bytes by which the notebook's process may grow while a rank floods it."""


class CountingSink(Sink):
    """Sink that counts a rank's output instead of keeping it; it records the first and the last piece."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.count, self.foreign = rank, 0, 0

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        for chunk in chunks:
            if not isinstance(chunk, Stream):
                continue
            if not self.count:
                self.tell(f"rank {rank} writes")
            self.count += len(chunk.text)
            self.foreign += len(chunk.text) if rank != self.rank else 0
            self.largest = max(self.largest, psutil.Process().memory_info().rss)

    largest = 0


class Scarcity(Pieces):
    """Trials of too much output and of too little room."""

    def flooding(self) -> None:
        """Let a rank write 100 MB in the middle of the training: all of it comes, and the notebook's process stays
        small."""
        sink = self.sink = CountingSink(self.victim)
        run = self.begin(steps=30, bytes=FLOOD)
        before = psutil.Process().memory_info().rss
        at = self.await_fault()
        line = sink.await_line(lambda text: "writes" in text, self.campaign.hang_after)
        self._goes_on(run)
        if line is not None:
            self.outcome.report = line[0] - at
        if sink.count != FLOOD or sink.foreign:
            self.outcome.wrong.append(f"{sink.count} of {FLOOD} bytes came, {sink.foreign} of other ranks")
        if sink.largest - before > GROWTH:
            self.outcome.wrong.append(
                f"the notebook's process has grown by {(sink.largest - before) >> 20} MiB"
            )

    def filling_disk(self) -> None:
        """Fill the disk on which the notebook's process keeps a cell's output: it is shown, and the cell continues."""
        sink = self.sink = CountingSink(self.victim)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Which no process inherits that is forked for the ranks: the fork server is there already.
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
        try:
            run = self.begin(steps=30, bytes=4 * ROOM // len(LINE) * len(LINE))
            at = self.await_fault()
            line = sink.await_line(lambda text: "writes" in text, self.campaign.hang_after)
            self._goes_on(run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if line is not None:
            self.outcome.report = line[0] - at
        if sink.count != 4 * ROOM // len(LINE) * len(LINE):
            self.outcome.wrong.append(f"{sink.count} bytes came")
        recorder = self.campaign.pool.transcripts.find("7")
        assert recorder is not None
        kept = recorder.transcript
        if not kept.lost or not kept.why:
            self.outcome.wrong.append("nobody says that what was written could not be kept")


def little_shared_memory(mebibytes: int = 64) -> list[str]:
    """Before a command: it has a ``/dev/shm`` of this size for itself. Empty where that is not allowed."""
    prefix = ["unshare", "--mount", "sh", "-ec"]
    script = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm; exec "$@"'
    probe = subprocess.run([*prefix, script, "sh", "true"], capture_output=True, check=False)
    return [*prefix, script, "sh"] if os.geteuid() == 0 and probe.returncode == 0 else []
