"""A notebook over a pool without processes: ranks are threads that ``exec`` cells, behind the real run machinery."""

from __future__ import annotations

import ast
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.protocol.messages import Decision
from hvdlab.kernel_ext.notebook.cells.cell_events import DeadlineReached, DoneArrived, OutputArrived, RankDied
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.dispatch import CellRequest
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.output.transcript import TranscriptStore
from hvdlab.kernel_ext.rank.cell_source import parse
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, Chunk, Display, Stream
from hvdlab.kernel_ext.wire.status import UserNames
from hvdlab.magics.extension import Extension
from support.patience import PATIENCE


class _Died(BaseException):
    pass


class FakeRank:
    """One rank's variables, and a cell's calls on it: print, err, show, block, die."""

    def __init__(self, rank: int, size: Callable[[], int]) -> None:
        self.rank = rank
        self.stop = threading.Event()
        self.emit: Callable[[Chunk], None] = lambda chunk: None
        self.variables: dict[str, Any] = {
            "rank": rank,
            "size": size,
            "print": lambda *args, end="\n": self.emit(Stream("stdout", " ".join(map(str, args)) + end)),
            "err": lambda text: self.emit(Stream("stderr", text)),
            "show": lambda data, **kwargs: self.emit(Display(data, {}, **kwargs)),
            "block": self._block,
            "die": self._die,
        }

    def _block(self) -> None:
        self.stop.wait(PATIENCE)
        raise KeyboardInterrupt

    def _die(self) -> None:
        raise _Died

    def run(self, source: str, offset: int, cell: str) -> CellDone | None:
        try:
            tree = parse("\n" * offset + source)
            assert isinstance(tree, ast.Module)
            last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            if last is not None:
                tree.body.pop()
            exec(compile(tree, "<cell>", "exec"), self.variables)  # noqa: S102
            value = None
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), self.variables)
        except _Died:
            return None
        except BaseException as error:  # noqa: BLE001
            lines = tuple(traceback.format_exception(error)[-2:])
            stopped = isinstance(error, KeyboardInterrupt)
            failure = CellError(
                type(error).__name__, str(error), lines, time.monotonic_ns(), interrupted=stopped
            )
            return CellDone(cell, failure, 0.1)
        if value is None:
            return CellDone(cell, None, 0.1)
        self.emit(Display({"text/plain": repr(value)}, {}, result=True))
        return CellDone(cell, None, 0.1, True, pickle.dumps(value), repr(value))


@dataclass
class FakeLink:
    """`CellLink` to such ranks: an interrupt stops them, and they need no acknowledgement."""

    ranks: dict[int, FakeRank]

    def acknowledge(self, rank: int, taken: int) -> None: ...

    def interrupt(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if rank in self.ranks:
                self.ranks[rank].stop.set()

    def request_stacks(self, ranks: tuple[int, ...]) -> None: ...

    def probe_processes(self, ranks: tuple[int, ...]) -> None: ...

    def finished(self, results: CellResults) -> None: ...


class FakePool:
    """Pool with the methods that the magics use."""

    def __init__(
        self, np: int | None, *, launcher: str = "local", plane: str = "auto", **kwargs: Any
    ) -> None:
        self.resumed: tuple[Any, ...] = ()
        if launcher not in ("local", "mpi"):
            raise StartError(
                f"the launcher {launcher!r} is not installed; `pip install hvdlab[{launcher}]` adds it"
            )
        self.name, self.detached, self.told = kwargs.get("keep") or "", False, list[str]()
        self.launcher, self.plane, self.state, self.broken = launcher, plane, "idle", ""
        self.replaceable = launcher == "local"
        self.launcher_options = kwargs.get("launcher_options", {})
        self.lost: dict[int, str] = {}
        self.transcripts = TranscriptStore(Path("/proc/nowhere"))
        self.states: dict[int, str] = {}
        self.hanging: dict[int, str] = {}
        self.first_to_fail: int | None = None
        self._ranks: dict[int, FakeRank] = {}
        self.newcomers: tuple[int, ...] = ()
        self.synced: list[tuple[Any, ...]] = []
        self.resize(np or 2)
        self.newcomers = ()
        self.restarted: list[int] = []
        self._threads: list[threading.Thread] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._ranks)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def resize(self, np: int) -> None:
        for rank in range(np, self.size):
            del self._ranks[rank]
        for rank in range(self.size, np):
            self._ranks[rank] = FakeRank(rank, lambda: self.size)
            self.newcomers += (rank,)
        self.newcomers = tuple(rank for rank in self.newcomers if rank < np)

    def sync(
        self,
        ranks: Sequence[int] | None = None,
        *,
        source: int | None = None,
        without: Sequence[str] = (),
    ) -> str:
        if "everything" in without:
            raise HvdlabError("rank 0 has nothing left")
        self.synced.append((ranks, source, tuple(without)))
        new, self.newcomers = self.newcomers, ()
        return f"synced {list(new if ranks is None else ranks)}"

    def stop(self) -> None:
        self.state = "stopped"
        for thread in self._threads:
            thread.join()

    def news(self) -> list[str]:
        told, self.told = self.told, []
        return told

    def detach(self) -> None:
        if not self.name:
            raise InvalidRequestError("only a pool that was started with keep= can be left to itself")
        self.detached, self.state = True, "stopped"

    def restart(self, ranks: Sequence[int]) -> None:
        self.restarted = list(ranks)

    def names(self, ranks: Sequence[int] | None = None) -> dict[int, UserNames]:
        return {}

    def repair(self) -> list[int]:
        return []

    def story(self, last: int = 20, *, rank: int | None = None, name: str = "") -> tuple[Decision, ...]:
        facts = {"reason": "killed by SIGKILL"}
        told = (
            Decision(17, 0.25, "lost connection", ranks=(1,), facts={"reason": "end of file"}),
            Decision(18, 0.5, "died", 17, ranks=(1,), facts=facts),
            Decision(19, 0.75, "aborted", 18, 0, 3, ("<loss>",)),
        )
        return tuple(d for d in told if rank is None or rank in d.ranks)[-last:]

    def explain(self, results: CellResults) -> None:
        if results.deaths:
            results.story = ("18 died rank 1",)

    def status(self) -> list[Any]:
        return [
            SimpleNamespace(
                rank=r,
                host="here",
                pid=100 + r,
                device="cpu",
                state=self.states.get(r, "idle"),
                cell="",
                rss=5 << 20,
                pss=3 << 20,
                cpu=1.25,
                plane=self.plane,
                servers=(),
            )
            for r in self.ranks
        ]

    def pull(self, name: str, ranks: Sequence[int] | None = None, *, imports: Any = None) -> dict[int, Any]:
        return {r: self._ranks[r].variables[name] for r in ranks or self.ranks}

    def push(self, **values: Any) -> None:
        for rank in self._ranks.values():
            rank.variables.update(values)

    def run_cell(self, request: CellRequest) -> CellResults:
        return self._start(request).wait()

    def start_cell(self, request: CellRequest) -> CellHandle:
        handle = self._start(request)
        handle.drive_in_background()
        return handle

    def _start(self, request: CellRequest) -> CellHandle:
        label, ranks = request.label, self.ranks if request.ranks is None else request.ranks
        chosen = {r: self._ranks[r] for r in ranks}
        for rank in chosen.values():
            rank.stop.clear()
        recorder = self.transcripts.record(uuid.uuid4().hex, label, ranks, request.out)
        handle = CellHandle(
            CellState("c", ranks, label=label, now=time.monotonic(), timeout=request.timeout),
            recorder,
            FakeLink(chosen),
        )
        recorder.driven(lambda: handle.post(DeadlineReached()))
        for rank in chosen.values():
            thread = threading.Thread(
                target=self._run_rank, args=(rank, handle, request.source, request.line_offset)
            )
            self._threads.append(thread)
            thread.start()
        return handle

    def _run_rank(self, rank: FakeRank, handle: CellHandle, source: str, offset: int) -> None:
        total = 0

        def emit(chunk: Chunk) -> None:
            nonlocal total
            total += 100
            handle.post(OutputArrived(rank.rank, (chunk,), total))

        rank.emit = emit
        done = rank.run(source, offset, "c")
        if done is None:
            handle.post(RankDied(rank.rank, "killed by SIGKILL", time.monotonic_ns()))
        else:
            handle.post(DoneArrived(rank.rank, done))


@dataclass
class Ran:
    """Effects of a cell."""

    stdout: str
    stderr: str
    error: BaseException | None
    result: Any
    displays: list[Any] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def usage_error(self) -> str:
        assert self.stderr.startswith("UsageError: "), self.stderr
        assert "Traceback" not in self.stderr + self.stdout
        return self.stderr.removeprefix("UsageError: ").strip()


class Notebook:
    """Notebook that runs cells as a frontend would."""

    def __init__(self, shell: InteractiveShell, extension: Extension) -> None:
        self.shell, self.extension = shell, extension

    def run(self, cell: str) -> Ran:
        with capture_output() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        return Ran(captured.stdout, captured.stderr, error, result.result, captured.outputs)

    @property
    def pool(self) -> FakePool:
        pool = self.extension.session.pool
        assert isinstance(pool, FakePool)
        return pool
