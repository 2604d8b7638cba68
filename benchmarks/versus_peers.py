"""Faults as users of notebooks with several processes see them: hvdlab beside its peers.

    python benchmarks/versus_peers.py --json benchmarks/results/versus_peers.json   # some 20 minutes, needs a package index
    python benchmarks/versus_peers.py --only hvdlab --case kill
    python benchmarks/versus_peers.py --table-of benchmarks/results/versus_peers.json --page docs/reference/faults.md
    python benchmarks/versus_peers.py --costs 5                                     # an empty call, start and memory beside Monarch

Each peer is installed into an environment of its own (``--venvs`` keeps them; Monarch's is made by ``make monarch``, and
without it Monarch is left out), with the same PyTorch, and driven as a frontend drives it: a fresh Jupyter kernel for each
case, cells sent to it, its messages read, its interrupt button pressed. Monarch has no cells on ranks, so that a magic sends
them to an endpoint of actors. Peers use ``torch.distributed`` with Gloo as their documentation shows; hvdlab uses its own collectives.

The cases, on four ranks:

=============  ==================================================================================================
``skip``       rank 1 does not call an allreduce that the others call; its part of the cell ends
``raise``      rank 1 raises an exception while the others call an allreduce
``interrupt``  rank 1 sleeps, the others wait in an allreduce, and the user presses the button after 3 s
``kill``       all train (an allreduce in a loop), and rank 1 gets SIGKILL
=============  ==================================================================================================

Measured in each: after how long the cell ended; after how long the user learnt of rank 1 (by any message that names
it, other than as one of several labels of output); whether a cell that follows sees a variable that the other ranks
had before; and whether an allreduce in the cell after it gives the right sum on all ranks that live. A cell that takes
longer than the limit is given as such, and the button is pressed before the next cell is tried. Evidence is kept in the
result file: the text that the user saw.

``--costs`` runs scripts in place of notebooks, hvdlab's and Monarch's at the same time, in turn: a fresh start of both in each
round, then ten times twenty empty calls, and the proportional set size of the script and all its processes. A script that
does not answer within the limit is ended, and shown as one that hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager
from pages import conditions, write

RANKS = 4
CULPRIT = 1
TORCH = "2.13.0"
CASES = ("skip", "raise", "interrupt", "kill")
NEXT = 45.0
"""Seconds that the cells after the fault may take."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TAGS = re.compile(r"<style.*?</style>|<[^>]*>", re.DOTALL)


# -- peers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Contender, with its syntax.

    Attributes:
        name, version: Of the package.
        begin: Cells that start the ranks; ``{ranks}`` is their number.
        prefix: Line above a cell that is meant for all ranks.
        survivors: Line above a cell that is meant for the ranks that are left after a death.
        rank: Expression for a rank's number, on the rank.
        join: Code on each rank that makes a group of them; ``{port}`` is free.
        allreduce: Statement that sums ``x`` over the ranks.
        proxy: Module of the kernel, if it is not ipykernel's.
        label: Pattern of the text that introduces a rank's output, which does not count as naming a rank.
    """

    name: str
    version: str
    begin: tuple[str, ...]
    prefix: str
    survivors: str
    rank: str
    join: str
    allreduce: str = "dist.all_reduce(x)"
    proxy: str = ""
    label: str = ""


GROUP = (
    "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', rank=rank, world_size={ranks}, init_method='tcp://127.0.0.1:{port}')"
)

MONARCH = Path(__file__).absolute().parents[1] / "out/monarch/bin/python"
"""Interpreter of the environment that ``make monarch`` makes."""

# A notebook's user has actors run cells by an endpoint, whose call is waited for as Monarch's documentation shows. Actors that are
# left after a death are called one by one, each with a limit, so that one that hangs does not hide the others' output.
ACTORS = """
import contextlib, io
from IPython.core.magic import register_cell_magic
from monarch import actor

class Rank(actor.Actor):
    def __init__(self):
        self.variables = {{"actor": actor}}

    @actor.endpoint
    def run(self, code: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.variables)
        return out.getvalue()

ranks = actor.this_host().spawn_procs({{"ranks": {ranks}}}).spawn("rank", Rank)

@register_cell_magic
def actors(line, cell):
    if not line:
        for point, text in ranks.run.call(cell).get().items():
            print(f"rank {{point.rank}}:", text, sep="\\n")
        return
    calls = {{int(rank): ranks.slice(ranks=int(rank)).run.call_one(cell) for rank in line.split(",")}}
    for rank, call in calls.items():
        try:
            print(f"rank {{rank}}:", call.get(timeout=10), sep="\\n")
        except Exception as error:
            print(f"rank {{rank}}:", repr(error), sep="\\n")
"""

PEERS = (
    Peer(
        "hvdlab",
        "",
        ("%load_ext hvdlab", "%hvd_pool start -np {ranks}"),
        "%%hvd_run",
        "%%hvd_run",
        "int(os.environ['RANK'])",
        "import hvdlab.torch as hvd\nhvd.init()",
        "x = hvd.allreduce(x, op=hvd.Sum)",
    ),
    Peer(
        "ipyparallel",
        "9.2.0",
        (
            "import ipyparallel, logging\n"  # noqa: ISC004
            "rc = ipyparallel.Cluster(n={ranks}, log_level=logging.ERROR).start_and_connect_sync()\n"
            "for i in rc.ids: rc[i].push(dict(number=i), block=True)",
        ),
        "%%px",
        "%%px --targets 0,2,3",
        "number",
        GROUP,
        label=r"\[(stdout|stderr|output):\d+\]|Out\[\d+:\d+\]|^%px:.*$",
    ),
    Peer(
        "nbdistributed",
        "0.1.0",
        ("%load_ext nbdistributed", "%dist_init -n {ranks}"),
        "",
        "%%rank [0,2,3]",
        "dist.get_rank()",
        "import torch.distributed as dist",
        label=r"(🔹|✓|✅)? ?Rank \d+:?$",
    ),
    Peer(
        "jupyter-distributed",
        "0.1.1",
        (),
        "",
        "",
        "int(os.environ['RANK'])",
        GROUP,
        proxy="jupyter_distributed.kernel",
        label=r"^\W*Rank \d+\W*$",
    ),
    Peer(
        "monarch",
        "0.7.0",
        (ACTORS,),
        "%%actors",
        "%%actors 0,2,3",
        "actor.current_rank().rank",
        GROUP,
        label=r"^rank \d+:$",
    ),
)


def environment(peer: Peer, directory: Path) -> Path:
    """Return the Python of an environment that has the peer; made if it is not there."""
    if peer.name == "hvdlab":
        return Path(sys.executable)
    if peer.name == "monarch":
        return MONARCH
    place = directory / peer.name
    python = place / "bin" / "python"
    if not (place / "installed").exists():
        print(f"installing {peer.name} {peer.version} into {place}", flush=True)
        venv.create(place, with_pip=True)
        wanted = [f"{peer.name}=={peer.version}", f"torch=={TORCH}", "ipykernel", "numpy"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (place / "installed").touch()
    return python


# -- a notebook -------------------------------------------------------------------------------------------------------


class Notebook:
    """Kernel, the cells that are sent to it, and all that comes back, with the time.

    Args:
        python: The interpreter.
        peer: Whose kernel.
        directory: Where it works.
    """

    def __init__(self, python: Path, peer: Peer, directory: Path) -> None:
        environ = {
            **os.environ,
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "IPYTHONDIR": str(directory / "ipython"),
            "JUPYTER_PATH": str(directory / "jupyter"),
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(RANKS),
            "JUPYTER_DISTRIBUTED_BASE_KERNEL": "rank",
            "OMP_NUM_THREADS": "1",
        }
        self._spec(directory, "rank", [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"])
        module = peer.proxy or "ipykernel_launcher"
        spec = [str(python), "-m", module, "-f", "{connection_file}"]
        self._spec(directory, "notebook", spec, "message" if peer.proxy else "signal")
        with _environ(JUPYTER_PATH=environ["JUPYTER_PATH"]):
            self._manager = KernelManager(kernel_name="notebook")
            log = open(directory / "kernel.log", "wb")  # noqa: SIM115  (closed below)
            self._manager.start_kernel(cwd=str(directory), env=environ, stdout=log, stderr=log)
            log.close()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        self._cell = ""
        self.ended: float | None = None
        self.said: list[tuple[float, str]] = []

    @staticmethod
    def _spec(directory: Path, name: str, argv: list[str], interrupt: str = "signal") -> None:
        place = directory / "jupyter" / "kernels" / name
        place.mkdir(parents=True)
        spec = {"argv": argv, "display_name": name, "language": "python", "interrupt_mode": interrupt}
        (place / "kernel.json").write_text(json.dumps(spec))

    def send(self, code: str) -> float:
        """Send a cell; returns when."""
        self.said, self.ended = [], None
        self._cell = self._client.execute(code)
        return time.time()

    def listen(self, until: Callable[[], bool], seconds: float) -> bool:
        """Take messages until this is so or the time is over. Returns whether it is so."""
        deadline = time.time() + seconds
        while not until():
            left = deadline - time.time()
            if left <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self._take(self._client.get_iopub_msg(timeout=min(left, 0.05)))
        return True

    def _take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        mine = message["parent_header"].get("msg_id") == self._cell
        if kind == "status" and content["execution_state"] == "idle" and mine:
            self.ended = time.time()
        text = ""
        if kind == "stream":
            text = content["text"]
        elif kind == "error":
            text = "\n".join([content["ename"], content["evalue"], *content["traceback"]])
        elif kind in ("display_data", "update_display_data", "execute_result"):
            data = content["data"]
            text = data.get("text/plain") or _TAGS.sub("\n", str(data.get("text/html", "")))
        if text:
            self.said.append((time.time(), _ANSI.sub("", text)))

    def run(self, code: str, seconds: float) -> str:
        """Run a cell and return its output. Presses the button if it takes longer."""
        self.send(code)
        if not self.listen(lambda: self.ended is not None, seconds):
            self.interrupt()
            self.listen(lambda: self.ended is not None, 5)
            self.said.append((time.time(), f"(interrupted after {seconds:g} s)"))
        self.listen(lambda: False, 0.2)
        self._reply()
        return self.text()

    def _reply(self) -> None:
        """Record the error in a cell's answer, since some kernels report it only there."""
        with contextlib.suppress(queue.Empty):
            while True:
                reply = self._client.get_shell_msg(timeout=0.1)
                content = reply["content"]
                if reply["parent_header"].get("msg_id") == self._cell and content.get("status") == "error":
                    self.said.append((time.time(), f"{content.get('ename')}: {content.get('evalue')}"))

    def text(self) -> str:
        return "".join(text if text.endswith("\n") else text + "\n" for _, text in self.said)

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._manager.shutdown_kernel(now=False)
        self._client.stop_channels()
        self._manager.cleanup_resources()


@contextlib.contextmanager
def _environ(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- the cases --------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Observations of one peer's user in one case; times in seconds from the fault, None if the limit was reached.

    Attributes:
        ended: Until the cell ended.
        named: Until rank 1 was named.
        answered: Whether the next cell, which prints that variable, ended by itself.
        kept: How many of the other ranks' variables are still there, of how many.
        sums: How many ranks got the right sum in the next cell, of how many that live.
        next: Seconds that the next collective took.
        saw: The text of the cell.
        next_saw: The text of the cells after it.
        trouble: Why the case could not be played, if so.
    """

    ended: float | None = None
    named: float | None = None
    answered: bool = True
    kept: tuple[int, int] = (0, 0)
    sums: tuple[int, int] = (0, 0)
    next: float | None = None
    saw: str = ""
    next_saw: list[str] = field(default_factory=list)
    trouble: str = ""


FAULTS = {
    "skip": "if rank != 1:\n    x = torch.ones(1000)\n    {allreduce}\nelse:\n    mark('fault')",
    "raise": (
        "if rank == 1:\n    mark('fault')\n    raise ValueError('no data for this rank')\nx = torch.ones(1000)\n{allreduce}"
    ),
    "interrupt": "if rank == 1:\n    mark('fault')\n    time.sleep(1000)\nx = torch.ones(1000)\n{allreduce}",
    "kill": "mark('on')\nwhile True:\n    x = torch.ones(1000)\n    {allreduce}\n    time.sleep(0.01)",
}

SETUP = """{prefix}
import os, time, torch
{early}
rank = {rank}
{late}
def mark(what):
    with open(r'{directory}/' + what + '.' + str(rank) + '.part', 'w') as file:
        file.write(repr((time.time(), os.getpid())))
    os.replace(file.name, file.name[:-5])
kept = rank * 1000 + 7
x = torch.ones(1000)
{allreduce}
mark('ready')"""


def names(text: str, peer: Peer) -> bool:
    """Whether the text singles rank 1 out."""
    if peer.label:
        text = re.sub(peer.label, "", text, flags=re.MULTILINE)
    groups = re.findall(r"(?i)\b(?:ranks?|engines?|process(?:es)?|workers?)[ ':=#]*([0-9][0-9, -]*)", text)
    groups += re.findall(r"\[(\d+):\w+\]", text)
    if re.search(
        r"(?i)\b(rank|engine|process|worker)[ :=#]*1\b[^\n]{0,30}\b(error|failed|died|dead|lost|killed)\b",
        text,
    ):
        return True
    named = {rank for group in groups for rank in _numbers(group)}
    return CULPRIT in named and len({g.strip() for g in groups} - {"1"}) < RANKS - 1


def under_label(text: str) -> bool:
    """Whether the text shows the error that rank 1 raises as this rank's."""
    before, error, _ = text.rpartition("no data for this rank")
    labels = re.findall(r"(?i)\brank (\d+)|\[(\d+):\w+\]", before) if error else []
    return bool(labels) and str(CULPRIT) in labels[-1]


def _numbers(listed: str) -> list[int]:
    found: list[int] = []
    for a, b in re.findall(r"(\d+)(?:-(\d+))?", listed):
        found += range(int(a), int(b or a) + 1)
    return found


class Case:
    """One case on a fresh kernel of one peer."""

    def __init__(self, peer: Peer, python: Path, case: str, limit: float) -> None:
        self.peer, self.python, self.case, self.limit = peer, python, case, limit
        self.found = Found()

    def play(self) -> Found:
        """Play it; errors before the fault are in ``trouble``."""
        with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as directory:
            self.directory = Path(directory)
            notebook = Notebook(self.python, self.peer, self.directory)
            try:
                self._set_up(notebook)
                self._fault(notebook)
                self._afterwards(notebook)
            except RuntimeError as error:
                self.found.trouble = str(error)[-3000:]
            finally:
                notebook.close()
                self._sweep()
        return self.found

    def _set_up(self, notebook: Notebook) -> None:
        said = [notebook.run(code.format(ranks=RANKS), 120) for code in self.peer.begin]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        join = self.peer.join.format(ranks=RANKS, port=port)
        early, late = (join, "") if "get_rank" in self.peer.rank else ("", join)
        setup = SETUP.format(
            prefix=self.peer.prefix,
            early=early,
            late=late,
            rank=self.peer.rank,
            directory=self.directory,
            allreduce=self.peer.allreduce,
        )
        ready: list[int] = []
        for _ in range(3):  # a peer's ranks may still be starting when it reports that they have
            said.append(notebook.run(setup.lstrip("\n"), 120))
            ready = [rank for rank in range(RANKS) if self._is_marked("ready", rank)]
            if len(ready) == RANKS:
                break
        self.pids = {rank: self._marked("ready", rank)[1] for rank in ready}
        if len(self.pids) < RANKS:
            raise RuntimeError("the ranks did not start: " + "\n".join(said))

    def _is_marked(self, what: str, rank: int) -> bool:
        return (self.directory / f"{what}.{rank}").exists()

    def _marked(self, what: str, rank: int) -> tuple[float, int]:
        at, pid = (self.directory / f"{what}.{rank}").read_text().strip("()").split(",")
        return float(at), int(pid)

    def _code(self, code: str, prefix: str) -> str:
        code = code.replace("{allreduce}", self.peer.allreduce)
        return f"{prefix}\n{code}" if prefix else code

    def _fault(self, notebook: Notebook) -> None:
        notebook.send(self._code(FAULTS[self.case], self.peer.prefix))
        if self.case == "kill":
            self._await(notebook, "on", range(RANKS))
            notebook.listen(lambda: False, 1.0)
            at = time.time()
            os.kill(self.pids[CULPRIT], signal.SIGKILL)
        else:
            self._await(notebook, "fault", [CULPRIT])
            at = self._marked("fault", CULPRIT)[0]
        if self.case == "interrupt":
            notebook.listen(lambda: notebook.ended is not None, 3.0)
            at = time.time()
            notebook.interrupt()
        if notebook.listen(lambda: notebook.ended is not None, self.limit):
            notebook.listen(lambda: False, 0.3)
            assert notebook.ended is not None
            self.found.ended = round(notebook.ended - at, 3)
        self.found.named = self._when_named(notebook, at)
        self.found.saw = _clipped(notebook.text())
        if self.found.ended is None:
            notebook.interrupt()
            notebook.listen(lambda: notebook.ended is not None, 10)

    def _await(self, notebook: Notebook, what: str, ranks: Any) -> None:
        if not notebook.listen(lambda: all(self._is_marked(what, rank) for rank in ranks), 60):
            raise RuntimeError(f"the ranks did not get to the fault: {notebook.text()}")

    def _when_named(self, notebook: Notebook, at: float) -> float | None:
        text = ""
        for when, piece in notebook.said:
            text += piece
            if when >= at and (names(text, self.peer) or under_label(text)):
                return round(when - at, 3)
        return None

    def _afterwards(self, notebook: Notebook) -> None:
        dead = {CULPRIT} if self.case == "kill" else set()
        living = [rank for rank in range(RANKS) if rank not in dead]
        prefix = self.peer.survivors if dead else self.peer.prefix
        others = [rank for rank in range(RANKS) if rank != CULPRIT]
        said = notebook.run(self._code("print(f'KEPT-{rank}-{kept == rank * 1000 + 7}')", prefix), NEXT)
        self.found.answered = "(interrupted after" not in said
        self.found.kept = sum(f"KEPT-{rank}-True" in said for rank in others), len(others)
        began = time.time()
        summed = notebook.run(
            self._code("x = torch.ones(1000)\n{allreduce}\nprint(f'SUM-{rank}-{x[0].item()}')", prefix), NEXT
        )
        right = sum(f"SUM-{rank}-{len(living)}.0" in summed for rank in living)
        self.found.sums = right, len(living)
        if right == len(living) and notebook.ended is not None:
            self.found.next = round(notebook.ended - began, 3)
        self.found.next_saw = [_clipped(said), _clipped(summed)]

    def _sweep(self) -> None:
        """End leftovers of the peer: the processes that have reported their id."""
        for pid in getattr(self, "pids", {}).values():
            with contextlib.suppress(OSError):
                if str(self.directory) in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace"):
                    os.kill(pid, signal.SIGKILL)


def _clipped(text: str) -> str:
    return text if len(text) <= 4000 else text[:2000] + "\n[…]\n" + text[-2000:]


# -- costs ------------------------------------------------------------------------------------------------------------


class HangError(Exception):
    """Script of a contender that did not answer within the limit, and was ended.

    Args:
        name: The contender's name.
        limit: Seconds after which it was ended.
    """

    def __init__(self, name: str, limit: float) -> None:
        super().__init__(f"hangs (ended after {limit:g} s)")
        self.name = name


class CallScript:
    """Running ``empty_calls.py`` of one contender.

    Args:
        python: The interpreter.
        name: The contender's name.
        limit: Seconds that each answer may take.
    """

    def __init__(self, python: Path, name: str, limit: float) -> None:
        self._name, self._limit = name, limit
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("empty_calls.py")), name, str(RANKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._expect("ready")
        self.start = time.perf_counter() - begin
        """Seconds from the script's start until PyTorch was imported on all ranks."""

    def calls(self, count: int) -> list[float]:
        """Return the seconds of as many calls, which are made now."""
        self._input.write(f"{count}\n")
        self._input.flush()
        seconds: list[float] = json.loads(self._expect("["))
        return seconds

    def memory(self) -> float:
        """Return the MiB of the script and all its processes, with shared memory divided among those that share it."""
        return sum(one.memory_full_info().pss for one in self._family()) / 2**20

    def close(self) -> None:
        """End the script by the end of its input, or by SIGKILL if that takes longer than the limit."""
        family = self._family()
        self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._limit)
        self._end(family)
        self._process.wait()
        self._output.close()

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            script = psutil.Process(self._process.pid)
            return [script, *script.children(recursive=True)]
        return []

    @staticmethod
    def _end(family: list[psutil.Process]) -> None:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _expect(self, beginning: str) -> str:
        """Return the next line that begins so. The end of the limit ends the script, and with it the wait for the line."""
        over = threading.Event()

        def end() -> None:
            over.set()
            self._end(self._family())

        timer = threading.Timer(self._limit, end)
        timer.start()
        try:
            line = next((line for line in self._output if line.startswith(beginning)), None)
        finally:
            timer.cancel()
            timer.join()
        if line is not None:
            return line
        self.close()
        if over.is_set():
            raise HangError(self._name, self._limit)
        raise RuntimeError(
            f"the script of {self._name} ended by itself with status {self._process.returncode}"
        )


def costs(rounds: int, limit: float) -> dict[str, Any]:
    """Measure an empty call, start and memory of hvdlab and Monarch, in turn; the other one first in each round.

    One that hangs ends its round, and is left out of those that follow.
    """
    pythons = {"hvdlab": Path(sys.executable), "monarch": MONARCH}
    samples: dict[str, dict[str, list[float]]] = {
        name: {"start, s": [], "call, ms": [], "memory, MiB": []} for name in pythons
    }
    trouble: dict[str, str] = {}
    for number in range(rounds):
        order = sorted(pythons, reverse=bool(number % 2))
        scripts: dict[str, CallScript] = {}
        with contextlib.ExitStack() as stack:
            try:
                for name in order:
                    scripts[name] = CallScript(pythons[name], name, limit)
                    stack.callback(scripts[name].close)
                    samples[name]["start, s"].append(scripts[name].start)
                for _ in range(10):
                    for name in order:
                        samples[name]["call, ms"] += [1000 * seconds for seconds in scripts[name].calls(20)]
                for name in order:
                    samples[name]["memory, MiB"].append(scripts[name].memory())
            except HangError as error:
                trouble[error.name] = str(error)
                del pythons[error.name]
    medians = {
        name: {what: float(f"{statistics.median(values):.4g}") for what, values in found.items() if values}
        for name, found in samples.items()
    }
    return {**conditions("versus_monarch", rounds), "ranks": RANKS, "medians": medians, "trouble": trouble, "samples": samples}  # fmt: skip


def costs_table(report: dict[str, Any]) -> str:
    """Return the table of a report of costs, for a page."""
    names = list(report["medians"])
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for title, what, digits in COSTS:
        cells = [
            f"{report['medians'][name][what]:.{digits}f}"
            if what in report["medians"][name]
            else report["trouble"].get(name, "not measured")
            for name in names
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


COSTS = (
    ("start until PyTorch is imported on all ranks, s", "start, s", 2),
    ("an empty call of all ranks, ms", "call, ms", 2),
    ("memory of all processes, MiB", "memory, MiB", 0),
)
"""Rows of the table of costs: title, name of the figure, decimal places."""


# -- results ----------------------------------------------------------------------------------------------------------

TITLES = {
    "skip": "a rank skips an allreduce",
    "raise": "a rank raises, others wait in an allreduce",
    "interrupt": "interrupt, ranks wait in an allreduce",
    "kill": "SIGKILL of a rank while all train",
}


def markdown(report: dict[str, Any]) -> str:
    """Return the table for a page, from a result file."""
    peers = list(report["peers"])
    heads = [f"{name} {report['peers'][name]['version']}" for name in peers]
    machine = f"{report['ranks']} ranks on {report['cores']} cores, Python {report['python']}, PyTorch {report['torch']}."
    lines = [machine, "", "| | " + " | ".join(heads) + " |", "|---" * (len(peers) + 1) + "|"]
    for case in report["cases"]:
        lines.append(f"| **{TITLES[case]}** |" + " |" * len(peers))
        for title, show in ROWS:
            if case == "interrupt" and show is _named:
                continue  # no rank is to blame
            cells = [_cell(report["peers"][name]["cases"].get(case), show, report["limit"]) for name in peers]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Any] | None, show: Callable[[dict[str, Any], float], str], limit: float) -> str:
    if found is None:
        return "not run"
    return "did not start" if found["trouble"] else show(found, limit)


def _ended(found: dict[str, Any], limit: float) -> str:
    return f"more than {limit:g} s" if found["ended"] is None else f"{found['ended']:.1f} s"


def _named(found: dict[str, Any], limit: float) -> str:
    return "no" if found["named"] is None else f"yes, after {found['named']:.1f} s"


def _kept(found: dict[str, Any], limit: float) -> str:
    n, of = found["kept"]
    if n == of:
        return "yes"
    return f"{n} of {of}" if n else "no" if found["answered"] else f"no answer in {NEXT:g} s"


def _next(found: dict[str, Any], limit: float) -> str:
    n, of = found["sums"]
    return (
        f"yes, {found['next']:.2f} s" if found["next"] is not None else "no" if not n else f"on {n} of {of}"
    )


ROWS: tuple[tuple[str, Callable[[dict[str, Any], float], str]], ...] = (
    ("the cell ends after", _ended),
    ("the rank is named", _named),
    ("the next cell sees the others' variables", _kept),
    ("the next allreduce works", _next),
)


def publish(report: dict[str, Any], page: Path | None) -> None:
    """Write the table of a result into a page, or print it."""
    text = markdown(report)
    if page is None:
        print(text)
    else:
        write(page, "peers", text)


def publish_costs(report: dict[str, Any], json_file: Path | None) -> None:
    """Print the table of costs, and write the report into its file if one is given."""
    print(costs_table(report))
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=[peer.name for peer in PEERS], help="(default: all)"
    )
    parser.add_argument("--case", action="append", choices=CASES, help="(default: all)")
    parser.add_argument("--limit", type=float, default=90, help="seconds to wait for a cell's end")
    parser.add_argument("--venvs", type=Path, help="where the peers' environments are kept; else made anew")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="page whose table is written anew")
    parser.add_argument(
        "--table-of", type=Path, metavar="JSON", help="measure nothing; the table of this result"
    )
    parser.add_argument(
        "--costs", type=int, metavar="ROUNDS", help="measure those of hvdlab and Monarch, and no faults"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show what users saw")
    given = parser.parse_args()
    if given.table_of:
        publish(json.loads(given.table_of.read_text()), given.page)
        return
    if given.costs:
        if not MONARCH.exists():
            parser.error("--costs needs Monarch: `make monarch` makes its environment")
        publish_costs(costs(given.costs, given.limit), given.json)
        return
    with contextlib.ExitStack() as stack:
        venvs = given.venvs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        report = measure(given, venvs)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    publish(report, given.page)


def measure(given: argparse.Namespace, venvs: Path) -> dict[str, Any]:
    """Measure all cases of all peers."""
    report: dict[str, Any] = {
        "benchmark": "versus_peers",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "ranks": RANKS,
        "limit": given.limit,
        "cases": list(given.case or CASES),
        "peers": {},
    }
    for peer in PEERS:
        if given.only and peer.name not in given.only:
            continue
        if peer.name == "monarch" and not MONARCH.exists():
            print("monarch is left out: `make monarch` makes its environment", flush=True)
            continue
        python = environment(peer, venvs)
        cases: dict[str, Any] = {}
        version = peer.version or importlib.metadata.version(peer.name)
        report["peers"][peer.name] = {"version": version, "cases": cases}
        for case in report["cases"]:
            found = Case(peer, python, case, given.limit).play()
            cases[case] = asdict(found)
            shown = {k: v for k, v in cases[case].items() if k not in ("saw", "next_saw")}
            print(f"{peer.name:20} {case:10} {shown}", flush=True)
            if given.verbose:
                print(found.saw, *found.next_saw, sep="\n---\n", flush=True)
    return report


if __name__ == "__main__":
    main()
