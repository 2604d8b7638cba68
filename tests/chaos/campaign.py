"""A campaign: a real pool, faults drawn from a seed, and the checks after each.

Each trial is drawn from the campaign's seed and its own number alone, so that ``first`` plays a single one again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from chaos import census, standstill
from chaos.faults import FAULTS, STALL, Fault
from chaos.figures import Outcome
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.stack_probe import PY_SPY_WITHIN, program
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Stream
from support.patience import GONE, PATIENCE
from support.pool_probe import PoolProbe

if TYPE_CHECKING:
    from chaos.views import OpenViews

HANG = 60.0
"""Seconds after which what has not ended counts as hanging."""

SETTLE = GONE
"""Seconds that leftovers of a trial get to go."""

TESTS = str(Path(__file__).parents[1])
"""Where ranks find this package."""

DEVICE_SLACK = 128 << 20
"""Bytes on the device that may be in use beyond what was in use after the first trials: what the driver and torch keep for themselves."""


class Hang(Exception):
    """Something did not come to its end."""


class Sink(OutputSink):
    """Sink of a cell's messages to its user, with the times of them and of each rank's end."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []
        self.ends: dict[int, float] = {}
        self.over = False
        self._changed = threading.Condition()

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        for chunk in chunks:
            if isinstance(chunk, Stream):
                self.tell(f"rank {rank} wrote: {chunk.text.rstrip()}")

    def done(self, rank: int, done: CellDone | None) -> None:
        self.ends[rank] = time.monotonic()

    def finished(self, results: CellResults) -> None:
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def note(self, text: str, *, warning: bool = False) -> None:
        self.tell(text)

    def status(self, text: str, *, final: bool) -> None:
        if text:
            self.tell(f"status: {text}")

    def tell(self, text: str) -> None:
        """Record a message to the user, with the time."""
        with self._changed:
            self.told.append((time.monotonic(), text))
            self._changed.notify_all()

    def await_line(
        self, wanted: Callable[[str], bool], timeout: float, since: float = 0.0
    ) -> tuple[float, str] | None:
        """Return the first matching line since then, with its time; None if none comes within the time, or before the
        cell's end."""

        def found() -> tuple[float, str] | None:
            return next((line for line in self.told if line[0] >= since and wanted(line[1])), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self.over, timeout)
            return found()


class Mailbox:
    """Socket to which ranks report their events."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.letters: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._thread = threading.Thread(target=self._read, name="chaos-mailbox", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while letter := self._socket.recv(4096):
            with self._changed:
                self.letters.append(json.loads(letter))
                self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self.letters.clear()

    def wait(self, what: str, ranks: set[int], timeout: float) -> list[dict[str, Any]]:
        """Wait until all these ranks have sent this. Raises :class:`Hang`."""

        def those() -> list[dict[str, Any]]:
            return [one for one in self.letters if one["what"] == what and one["rank"] in ranks]

        with self._changed:
            if not self._changed.wait_for(lambda: {one["rank"] for one in those()} == ranks, timeout):
                raise Hang(f"ranks {sorted(ranks)} did not get to `{what}`: {self.letters}")
            return those()

    def wait_until(self, true: Callable[[list[dict[str, Any]]], bool], timeout: float) -> bool:
        """Whether this becomes true of the letters within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: true(self.letters), timeout)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"", self.path)
        self._thread.join()
        self._socket.close()
        os.unlink(self.path)


class Campaign:
    """Campaign of trials on a pool, which is replaced only if it can't be used any more. Context manager.

    Args:
        seed: Seed of all draws.
        plane: Data plane of the pool.
        size: Its ranks.
        faults: The faults to draw from.
        hang_after: Seconds after which an unfinished step counts as hanging.
        views: Whether views are open on the pool, which must show the recording's contents.
        device: Where ranks have their tensors, as torch names it; empty for arrays of numpy.
        alone: Whether no other program uses the device, so that its memory tells of leaks.
        inner: Torch's backend inside of the watched group of the wrapped model; empty for an agreed group.

    Attributes:
        started: How many pools there were.
        mailbox: Socket to which ranks report their events.
    """

    mailbox: Mailbox

    def __init__(
        self,
        seed: int,
        plane: str,
        *,
        size: int = 4,
        faults: Sequence[Fault] = FAULTS,
        hang_after: float = HANG,
        views: bool = False,
        device: str = "",
        alone: bool = True,
        inner: str = "",
    ) -> None:
        self.seed, self.plane, self.size, self.faults = seed, plane, size, tuple(faults)
        self.device, self.alone, self.inner = device, alone, inner
        #: The plane that the tensors of the training go over, in whose phases faults strike.
        self.struck_plane = "cuda/ipc" if device.startswith("cuda") else plane
        #: Bytes in use on the device after each of the pool's trials.
        self._used: list[int] = []
        self.hang_after = hang_after
        self.with_views = views
        #: Whether ranks have a wrapped model beside the training.
        self.wraps = any(fault.loop == "wrapped" for fault in self.faults)
        #: Steps that the wrapped model has been trained for, and the ranks that have had it since.
        self._trained = 0
        self._have_model: set[int] = set()
        self._views: OpenViews | None = None
        self.started = 0
        self._pool: Pool | None = None
        self._expected: dict[int, dict[str, Any]] = {}
        self._holdings: dict[int, census.Count] = {}
        self._young: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._family: Counter[str] = Counter()
        self._shm: set[str] = set()
        self._stack = contextlib.ExitStack()

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        # Unix sockets need a short path.
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp"))
        self.directory = Path(directory)
        self.temporary = self.directory / "t"
        self.temporary.mkdir()
        (self.directory / "run").mkdir(mode=0o700)
        self.mark = self.directory.name
        self._stack.enter_context(self._surroundings())
        self.mailbox = Mailbox(self.directory / "mail")
        self._stack.callback(self.mailbox.close)
        clock = self._stack.enter_context(standstill.start(self.mailbox.path, census.MARK))
        self._stack.callback(clock.stdin.close)  # type: ignore[union-attr]  # it is a pipe
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._stack.close()

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        ours = {
            census.MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
            "IPYTHONDIR": str(self.directory / "ipython"),
            # The import of torch's compiler makes it.
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
            "HVDLAB_PRELOAD": self._preloaded(),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL),
            "OMP_NUM_THREADS": "1",
        }
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        previous, tempfile.tempdir = tempfile.tempdir, str(self.temporary)
        added = TESTS not in sys.path
        if added:
            sys.path.insert(0, TESTS)
        try:
            yield
        finally:
            tempfile.tempdir = previous
            if added:
                sys.path.remove(TESTS)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _preloaded(self) -> str:
        if self.wraps:
            return "torch._dynamo,hvdlab.torch.c10d"
        if self.device:
            return "hvdlab.torch"
        return "torch" if self.plane == "gloo" else "numpy"

    @property
    def pool(self) -> Pool:
        """The pool; started if there is none."""
        if self._pool is None:
            self._shm = census.shared_memory()
            self._pool = Pool.start(self.size, plane=self.plane, timeout=self.hang_after)
            self.started += 1
            self.set_up(range(self.size))
            self.cell("training.check()")
            if self.wraps:
                self.train_on()
            self._join()
            if self.with_views:
                from chaos.views import OpenViews

                self._views = OpenViews(self._pool)
            self._family = Counter(census.marked(self.mark).values())
            self._holdings.clear()
            self._young.clear()
            self._used.clear()
        return self._pool

    def stop(self) -> list[str]:
        """End the pool. Returns its leftovers."""
        pool, self._pool = self._pool, None
        if pool is None:
            return []
        self._close_views()
        pool.stop()
        return self.leftovers()

    def wrong_views(self) -> list[str]:
        """Return the wrong contents of the open views."""
        return self._views.wrong() if self._views is not None else []

    def _close_views(self) -> None:
        views, self._views = self._views, None
        if views is not None:
            views.close()

    def leftovers(self) -> list[str]:
        """Return leftovers that exist without a pool; end or remove them, so that they do not disturb the next one."""
        left: list[str] = []
        if not census.settled(lambda: bool(census.marked(self.mark)), SETTLE):
            for pid, name in census.marked(self.mark).items():
                left.append(f"process {pid} {name}")
                # It can end by itself between the listing and the kill.
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
        if not census.settled(lambda: bool(census.files(self.temporary)), SETTLE):
            left += [f"file {name}" for name in sorted(census.files(self.temporary))]
        left += census.left_in_memory(self._shm, self.mark)
        return left

    def discard(self) -> None:
        """Get rid of a pool that is not as it should be."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        self._close_views()
        done = threading.Thread(target=pool.stop, daemon=True)
        done.start()
        done.join(PATIENCE)
        self.leftovers()

    # -- cells ----------------------------------------------------------------------------------------------------

    def cell(self, source: str, ranks: Sequence[int] | None = None) -> CellResults:
        """Run a cell that must not hang. Raises :class:`Hang`."""
        handle = self.pool.start_run(source, ranks=ranks)
        try:
            return handle.wait(self.hang_after)
        except TimeoutError:
            raise Hang(f"the cell `{source}` on {ranks or 'all'} ranks") from None

    def values(self, source: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Return values of a cell, by rank. Raises ``RuntimeError`` if it fails."""
        results = self.cell(source, ranks)
        if not results.ok:
            raise RuntimeError(f"`{source}` failed: {results.root_cause}")
        return {rank: results[rank] for rank in results.ranks}

    def set_up(self, ranks: Sequence[int]) -> None:
        """Define on the ranks the training and all that belongs to it."""
        given = f"({self.seed}, {self.mailbox.path!r})"
        source = f"from chaos.victim import Training\ntraining = Training{given}\n"
        if self.device:
            source = (
                "from chaos.on_device import DeviceTraining\n"
                f"training = DeviceTraining({self.seed}, {self.mailbox.path!r}, {self.device!r})\n"
            )
        if self.wraps:
            source += f"from chaos.wrapped import Wrapped\nwrapped = Wrapped({self.seed}, {self.mailbox.path!r}, {self.inner!r})\n"
        source += "training.memory()"
        for rank, memory in self.values(source, list(ranks)).items():
            self._expected[rank] = memory
        self._forget_models_of(ranks)

    def _forget_models_of(self, replaced: Sequence[int]) -> None:
        """Expect no training of the wrapped model any more once every rank that had it was replaced.

        Faults of other kinds replace ranks as well, and the wrapped model is trained only by its own: between two of those
        all ranks may be replaced one by one.
        """
        self._have_model -= set(replaced)
        if not self._have_model:
            self._trained = 0

    # -- state that a fault must not change -----------------------------------------------------------------------

    def lost_memory(self, ranks: Sequence[int]) -> list[str]:
        """Return the variables that these ranks have lost or changed."""
        lost: list[str] = []
        for rank, found in self.values("training.memory()", list(ranks)).items():
            wanted = self._expected[rank]
            lost += [
                f"rank {rank}: {name} is {found.get(name)} instead of {wanted[name]}"
                for name in wanted
                if name not in ("steps", "intact") and found.get(name) != wanted[name]
            ]
            if not found["intact"]:
                lost.append(f"rank {rank}: the weights are not those of the last completed step")
            if found["steps"] < wanted["steps"]:
                lost.append(f"rank {rank}: went back from step {wanted['steps']} to {found['steps']}")
            self._expected[rank] = found
        return lost

    def train_on(self) -> list[str]:
        """Let all ranks train their wrapped model for some steps. Returns the errors: their weights differ, or they
        have lost steps."""
        found = self.values("wrapped.check()")
        # Ranks that have exchanged messages keep the means of it until the generation ends, which is no leak.
        self.values("wrapped.end_generation()", [min(found)])
        if len(set(found.values())) > 1:
            return [f"the ranks' wrapped models differ: {found}"]
        before = self._trained
        self._trained, _ = next(iter(found.values()))
        self._have_model = set(found)
        if self._trained < before:
            return [f"the wrapped model went back from step {before} to {self._trained}"]
        return []

    def stacks(self) -> list[str]:
        """Return the stacks of the ranks, line by line: with py-spy those of all threads, else the Python stack of each rank's cell.

        An error in their place is a line, too: it must not hide the hang whose reason they are to show.
        """
        try:
            dump = [program(), "dump", "--native", "--pid"]
        except InvalidRequestError:  # py-spy is not installed
            dump = []
        try:
            if not dump:
                return str(self.pool.where()).splitlines()
            lines = []
            for rank, pid in sorted(PoolProbe(self.pool).group.pids().items()):
                done = subprocess.run(
                    [*dump, str(pid)], capture_output=True, text=True, timeout=PY_SPY_WITHIN, check=False
                )
                lines += [f"rank {rank}:", *(done.stdout or done.stderr).splitlines()]
        except (HvdlabError, OSError, subprocess.TimeoutExpired) as error:
            return [f"no stacks: {type(error).__name__}: {error}"]
        return lines

    def _join(self) -> None:
        """Let all ranks be ipyparallel's engines, as they become in quiet moments: that takes descriptors and threads."""
        pool = self.pool

        def lacks_engines() -> bool:
            assert pool.cluster is not None  # starts a controller if the last one has died
            return PoolProbe(pool).joining.joined != frozenset(pool.ranks)

        if not census.settled(lacks_engines, self.hang_after):
            raise Hang(
                f"only ranks {sorted(PoolProbe(pool).joining.joined)} of {pool.ranks} have joined ipyparallel"
            )

    def leaks(self) -> tuple[list[str], list[str]]:
        """Return resources that have grown, once those that are being closed had time to go; and those left to Gloo.

        Each process is compared with its own count after the second trial that it saw: until then it still opens its
        permanent resources.
        """
        self._join()
        # A trial of a wrapped model ends the generation, and with it each rank's context of Gloo: threads, sockets and pipes
        # that the next collective opens again. Ranks are counted with a context, at every trial.
        self.values("training.check()")
        if self.inner:
            self.values("wrapped.drop_aborted()")
        self.values("training.forget()")
        left = self.values(
            "training.forget()"
        )  # the shell lets go of a cell's error when the next cell has ended
        pids: dict[int, int] = PoolProbe(self.pool).group.pids()
        excused = {pids[rank] for rank, count in left.items() if count > self._left[pids[rank]]}
        self._left = Counter({pids[rank]: count for rank, count in left.items()})
        found: list[str] = []

        def look() -> bool:
            found[:] = self._grown(excused)
            return bool(found)

        census.settled(look, SETTLE)
        if self.device and self.alone:
            found += self._grown_on_device()
        kept = [f"rank {rank}: a group of Gloo's" for rank in left if pids[rank] in excused]
        living = self._pids()
        for pid in self._young.keys() - living.keys():
            # The kernel gives a number again: a later process must not be compared with this one.
            del self._young[pid]
            self._holdings.pop(pid, None)
        for pid in living:
            self._young[pid] += 1
            if self._young[pid] <= 2 or found or pid in excused:
                self._holdings[pid] = census.holdings(pid)
        if found:
            self._family = Counter(census.marked(self.mark).values())
            self._shm |= census.shared_memory()
        return found, kept

    def _grown_on_device(self) -> list[str]:
        """Return bytes in use on the device beyond those after the pool's first trials."""
        rank = min(self.pool.ranks)

        def used() -> int:
            return int(self.values("training.used()", [rank])[rank])

        now = used()
        if len(self._used) < 3:
            self._used.append(now)
            return []
        limit = max(self._used[:3]) + DEVICE_SLACK
        if now > limit and not census.settled(lambda: used() > limit, SETTLE):
            return [f"{(now - limit) >> 20} MiB more on the device than before"]
        return []

    def _pids(self) -> dict[int, str]:
        return {os.getpid(): "the pool's process", **census.marked(self.mark)}

    def _grown(self, excused: set[int]) -> list[str]:
        now = census.marked(self.mark)
        more = Counter(now.values()) - self._family
        found = [f"{n} x process {name}" for name, n in more.items()]
        for pid, name in self._pids().items():
            if self._young[pid] >= 2 and pid not in excused:
                extra = census.more(census.holdings(pid), self._holdings[pid])
                # Threads come and go with a library's calls; one more is a leak only if it is ours, and then it shows
                # at the end of the process.
                found += [f"{name} ({pid}): {n} x {kind}" for kind, n in extra.items()]
        return found + census.left_in_memory(self._shm, self.mark)

    # -- trials ---------------------------------------------------------------------------------------------------

    def draw(self, number: int) -> tuple[Fault, random.Random]:
        """Return the fault of a trial, and the generator of all its other draws."""
        rng = random.Random(f"{self.seed}/{number}/{self.plane}")
        return rng.choices(self.faults, [fault.weight for fault in self.faults])[0], rng

    def trial(self, number: int, fault: Fault | None = None) -> Outcome:
        """Play one; ``fault`` instead of a drawn one."""
        from chaos.trials import Trial

        drawn, rng = self.draw(number)
        return Trial(self, fault or drawn, number, rng).play()

    def play(self, count: int, first: int = 0) -> Iterator[Outcome]:
        """Play ``count`` trials, beginning with the one that has this number; each kind of fault once before any twice."""
        for number in range(first, first + count):
            yield self.trial(number, self.faults[number] if number < len(self.faults) else None)
