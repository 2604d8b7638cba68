"""Processes with a pool of their own, which are killed while it trains."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos import census
from chaos.pieces import Pieces
from hvdlab.kernel_ext.notebook.pool import Pool

OWNER = Path(__file__).with_name("owner.py")


class Owners(Pieces):
    """Trials of the death of a pool's owner."""

    def owner(self) -> None:
        """Start a process with a pool of its own, which is killed while it trains."""
        with self._owned() as (mark, temporary, process, _):
            at = time.monotonic()
            process.kill()
            process.wait()
            census.settled(lambda: bool(census.marked(mark) or census.files(temporary)), 10.0)
            self.outcome.report = time.monotonic() - at

    def keeping_owner(self) -> None:
        """As before, but the pool was to be kept: this process goes on with it."""
        name = f"kept-{self.outcome.number}"
        with self._owned(name) as (_, _, process, memory):
            at = time.monotonic()
            process.kill()
            process.wait()
            pool = Pool.attach(name, timeout=self.campaign.hang_after)
            try:
                self.outcome.report = time.monotonic() - at
                self.event("attached")
                pool.interrupt()  # they go on to train
                handle = pool.start_run("(training.check(), training.memory())")
                results = handle.wait(self.campaign.hang_after)
                self.outcome.next_collective = time.monotonic() - at - self.outcome.report
                if not results.ok:
                    self.outcome.wrong.append(f"the next cell failed: {results.root_cause}")
                    return
                for rank, (ranks, now) in ((rank, results[rank]) for rank in results.ranks):
                    if ranks != list(range(self.campaign.size)):
                        self.outcome.wrong.append(f"rank {rank} took part with {ranks}")
                    before = memory[str(rank)]
                    changed = [key for key in before if key != "steps" and now[key] != before[key]]
                    self.outcome.lost += [f"rank {rank}: {key} has changed" for key in changed]
            finally:
                pool.stop()

    @contextlib.contextmanager
    def _owned(self, *words: str) -> Iterator[tuple[str, Path, subprocess.Popen[bytes], dict[str, Any]]]:
        """Yield an owner that trains; afterwards nothing of it may be left."""
        self.campaign.mailbox.clear()
        mark = f"{self.campaign.mark}-{self.outcome.number}"
        shm = census.shared_memory()
        temporary = self.campaign.directory / f"o{self.outcome.number}"
        temporary.mkdir()
        command = [sys.executable, str(OWNER), str(self.campaign.size), self.campaign.plane]
        process = subprocess.Popen(
            [*command, self.campaign.mailbox.path, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                census.MARK: mark,
                "TMPDIR": str(temporary),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
                ),
            },
        )
        try:
            assert process.stdout is not None
            memory = json.loads(process.stdout.readline() or b"null")
            if memory is None:
                raise RuntimeError("the owner did not start")
            self.event("the owner's ranks train")
            time.sleep(self.rng.uniform(0, 0.5))
            yield mark, temporary, process, memory
        finally:
            process.kill()
            process.communicate()
        if not census.settled(lambda: bool(census.marked(mark) or census.files(temporary)), 5.0):
            self.outcome.leaks += [f"process {pid} {name}" for pid, name in census.marked(mark).items()]
            self.outcome.leaks += [f"file {name}" for name in sorted(census.files(temporary))]
        self.outcome.leaks += census.left_in_memory(shm, mark)
