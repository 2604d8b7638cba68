"""From a killed rank to the next step of the others, and from a new rank's appearance to its first step: hvdlab beside its peers.

::

    python -m venv out/torchft && out/torchft/bin/pip install torch==2.13.0 torchft==0.2.0 numpy
    python benchmarks/recovery.py --torchft out/torchft/bin/python --json benchmarks/results/recovery.json --page docs/reference/costs.md   # ten minutes

A model of 100 MB trains on three ranks; a fourth one appears, trains with them, and then one of the four gets SIGKILL. In each round
every system is started again and plays this once:

* ``hvdlab``: ``hvdlab run`` with a discovery script, whose answer changes from three slots to four; state is committed to memory;
* ``hvdlab, preloaded``: the same with ``--preload torch``, so that ranks are forked from a process that has imported it;
* ``torchelastic``: an agent of ``torchrun`` with three workers, which is joined by one with another worker; all of them load rank 0's
  checkpoint when they begin again. ``last_call_timeout`` is one second in place of 30;
* ``torchft``: three replica groups of one process and a lighthouse, as torchft's README starts them; a fourth group is started.

Each rank writes down when its steps begin and end. A time is that from the signal, or from the appearance (the changed answer, the start
of the newcomer's process), until three ranks, or all four, have completed a step that began after it. Reported are medians and
the worst over the rounds. ``by the best peer`` is the median by the smaller one of the peers'.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from pages import conditions, publish

WIDTH = 5000
"""A layer of so many squared weights is 100 MB."""
BATCH = 4  # rows of a batch
COMMIT_EVERY = 5
"""Steps between two commits to memory, or two checkpoints."""
BEFORE, ALL = 3, 4
"""Ranks before and after the fourth one appears."""
STEPS_BETWEEN = 2 * COMMIT_EVERY
"""Steps that all ranks have done before anything happens to them."""
PATIENCE = 180.0  # seconds until a system counts as stuck
CHECKPOINT = "checkpoint.pt"
FIGURES = {
    "start_s": f"from the start to {STEPS_BETWEEN} steps of three ranks",
    "newcomer_s": "from a fourth rank's appearance to a step of all four",
    "kill_s": "from SIGKILL of a rank to a step of the other three",
    "step_s": "a step of four ranks",
}
"""What the columns of a result mean."""


# -- in a rank --------------------------------------------------------------------------------------------------------


class Steps:
    """Record of a rank's steps, a line for each: when it began and ended by the clock of this machine.

    Args:
        directory: Where the ranks' files are.
    """

    def __init__(self, directory: Path) -> None:
        self._file = (directory / f"{os.getpid()}.steps").open("a", buffering=1)

    def completed(self, begin: float) -> None:
        """Write down a step that began then and has just ended."""
        self._file.write(f"{begin} {time.monotonic()}\n")


def model_and_batch() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(BATCH, WIDTH) / WIDTH


def train_with_hvdlab(directory: Path) -> None:
    import torch

    import hvdlab.torch as hvd

    hvd.init()
    model, batch = model_and_batch()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    steps = Steps(directory)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            begin = time.monotonic()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps.completed(begin)
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)


def train_with_torchelastic(directory: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, batch = model_and_batch()
    checkpoint, step = directory / CHECKPOINT, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    steps = Steps(directory)
    while True:
        begin = time.monotonic()
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        steps.completed(begin)
        step += 1
        if step % COMMIT_EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


def train_with_torchft(directory: Path) -> None:
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, batch = model_and_batch()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica-{os.getpid()}",
    )
    optimizer = Optimizer(manager, inner)
    steps = Steps(directory)
    while True:
        begin, before = time.monotonic(), manager.current_step()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        # Its DistributedDataParallel raises AssertionError in the survivors of a killed rank, and they end.
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if manager.current_step() > before:  # otherwise it was not committed
            steps.completed(begin)


TRAININGS: dict[str, Callable[[Path], None]] = {
    "hvdlab": train_with_hvdlab,
    "hvdlab, preloaded": train_with_hvdlab,
    "torchelastic": train_with_torchelastic,
    "torchft": train_with_torchft,
}


# -- the systems ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class System:
    """Job that trains.

    Args:
        directory: Where its ranks write down their steps.
        ended: Context that ends the job's processes.
        python: The interpreter of its ranks.
    """

    name = ""

    def __init__(self, directory: Path, ended: ExitStack, python: str) -> None:
        self.directory, self._ended, self._python = directory, ended, python

    def start(self) -> None:
        """Start three ranks."""
        raise NotImplementedError

    def add(self) -> None:
        """Let the fourth one appear."""
        raise NotImplementedError

    def run(self, *command: str, **environment: str) -> None:
        """Start a process, which ends with everything that it started when the job does."""
        log = (self.directory / "output.txt").open("ab")
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self._ended.callback(end, process)

    def script(self) -> list[str]:
        return [str(Path(__file__).resolve()), "--rank-of", self.name, "--directory", str(self.directory)]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher by SIGTERM, so that it ends its ranks, and the rest of its session after ten seconds."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Hvdlab(System):
    name = "hvdlab"
    options: tuple[str, ...] = ()

    def start(self) -> None:
        self._answer(BEFORE)
        script = self.directory / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {self.directory / 'hosts'}\n")
        script.chmod(0o700)
        options = [
            "--min-np",
            "2",
            "--max-np",
            str(ALL),
            "--host-discovery-script",
            str(script),
            *self.options,
        ]
        self.run(
            self._python, "-m", "hvdlab", "run", "-np", str(BEFORE), *options, self._python, *self.script()
        )

    def add(self) -> None:
        self._answer(ALL)

    def _answer(self, slots: int) -> None:
        new = self.directory / "hosts.new"
        new.write_text(f"localhost:{slots}\n")
        new.replace(self.directory / "hosts")


class Preloaded(Hvdlab):
    name = "hvdlab, preloaded"
    options = ("--preload", "torch")


class Torchelastic(System):
    name = "torchelastic"

    def start(self) -> None:
        self._port = free_port()
        self._agent(BEFORE)

    def add(self) -> None:
        self._agent(ALL - BEFORE)

    def _agent(self, workers: int) -> None:
        self.run(
            self._python, "-m", "torch.distributed.run",
            "--nnodes", "1:2", "--nproc-per-node", str(workers), "--max-restarts", "100",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-conf", "last_call_timeout=1",
            *self.script(),
            # With a shared store, PyTorch 2.13's first agent announces it to later ones only once, and an agent that
            # joins waits in vain.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip


class Torchft(System):
    name = "torchft"

    def start(self) -> None:
        self._port = free_port()
        self.run(
            str(Path(self._python).with_name("torchft_lighthouse")),
            *("--bind", f"[::]:{self._port}", "--min_replicas", "1"),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        )
        for _ in range(BEFORE):
            self.add()

    def add(self) -> None:
        self.run(self._python, *self.script(), TORCHFT_LIGHTHOUSE=f"http://localhost:{self._port}")


SYSTEMS: dict[str, type[System]] = {each.name: each for each in (Hvdlab, Preloaded, Torchelastic, Torchft)}
OURS = (Hvdlab.name, Preloaded.name)


# -- measurement ------------------------------------------------------------------------------------------------------


def steps_after(directory: Path, since: float) -> dict[int, list[float]]:
    """Return when each rank completed its steps that began after an instant, by the rank's process id."""
    found = {}
    for path in directory.glob("*.steps"):
        pairs = [line.split() for line in path.read_text().splitlines()]
        ends = [
            float(end) for begin, end in (pair for pair in pairs if len(pair) == 2) if float(begin) > since
        ]
        if ends:
            found[int(path.stem)] = ends
    return found


def wait_for(directory: Path, ranks: int, steps: int, since: float) -> tuple[float, list[int]]:
    """Wait until so many ranks have done so many steps that began after an instant.

    Returns:
        When the last one of them had done the first of these steps, and the process ids.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ends = {pid: each for pid, each in steps_after(directory, since).items() if len(each) >= steps}
        if len(ends) >= ranks:
            return sorted(each[0] for each in ends.values())[ranks - 1], sorted(ends)
        time.sleep(0.05)
    text = (directory / "output.txt").read_text(errors="replace")
    raise TimeoutError(f"{ranks} ranks did not do {steps} steps within {PATIENCE:g} s:\n{text[-3000:]}")


def play(kind: type[System], python: str) -> dict[str, float]:
    """Play one round of one system. Return its seconds."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as ended:
        system = kind(Path(name), ended, python)
        begin = time.monotonic()
        system.start()
        started, _ = wait_for(system.directory, BEFORE, STEPS_BETWEEN, begin)
        appeared = time.monotonic()
        system.add()
        joined, _ = wait_for(system.directory, ALL, 1, appeared)
        _, pids = wait_for(system.directory, ALL, STEPS_BETWEEN, joined)
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        killed = time.monotonic()
        os.kill(alive[1], signal.SIGKILL)
        went_on, _ = wait_for(system.directory, ALL - 1, 1, killed)
        steps = statistics.median(
            after - before
            for ends in steps_after(system.directory, joined).values()
            for before, after in pairwise(ends)
            if after < killed
        )
        return {
            "start_s": started - begin,
            "newcomer_s": joined - appeared,
            "kill_s": went_on - killed,
            "step_s": steps,
        }


def summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians and worst of each figure by system, and hvdlab's medians by the best peer's."""
    found: dict[str, Any] = {
        name: {
            figure: {
                "median": round(statistics.median(each[figure] for each in played), 3),
                "worst": round(max(each[figure] for each in played), 3),
            }
            for figure in played[0]
        }
        for name, played in rounds.items()
    }
    if peers := [name for name in rounds if name not in OURS]:
        for name in (each for each in OURS if each in rounds):
            found[f"{name}, by the best peer"] = {
                figure: round(
                    found[name][figure]["median"] / min(found[peer][figure]["median"] for peer in peers), 3
                )
                for figure in FIGURES
            }
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result file, for a page."""
    found = result["seconds"]
    names = [name for name in SYSTEMS if name in found]
    ratios = [f"{name}, by the best peer" for name in names if f"{name}, by the best peer" in found]
    lines = [
        ["median (worst), seconds", *names, *ratios],
        ["---", *["---:"] * (len(names) + len(ratios))],
    ]
    for figure, label in FIGURES.items():
        each = [f"{found[name][figure]['median']:.2f} ({found[name][figure]['worst']:.2f})" for name in names]
        lines.append([label, *each, *(f"{found[ratio][figure]:.2f}" for ratio in ratios)])
    table = ["| " + " | ".join(line) + " |" for line in lines]
    machine = f"{result['rounds']} rounds by turns, {result['cores']} cores, Python {result['python']}"
    return "\n".join([f"{machine}, load average {result['load_average']}.", "", *table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=SYSTEMS)
    parser.add_argument(
        "--torchft", metavar="PYTHON", help="an interpreter that has torchft; it is left out without"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="page whose table is written anew")
    parser.add_argument("--rank-of", choices=TRAININGS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        TRAININGS[given.rank_of](given.directory)
        return
    pythons = {name: given.torchft if name == Torchft.name else sys.executable for name in SYSTEMS}
    names = [name for name in given.only or SYSTEMS if pythons[name]]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(given.rounds):
        for name in names:
            rounds[name].append(play(SYSTEMS[name], pythons[name]))
            shown = ", ".join(f"{figure} {seconds:.2f}" for figure, seconds in rounds[name][-1].items())
            print(f"round {number + 1}, {name}: {shown}", file=sys.stderr, flush=True)
    result = {**conditions("recovery", given.rounds), "seconds": summary(rounds)}
    publish(result, markdown, json_file=given.json, page=given.page)


if __name__ == "__main__":
    main()
