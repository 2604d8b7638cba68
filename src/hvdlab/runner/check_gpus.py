"""``hvdlab check-gpus``: ranks on the GPUs of this machine check them, time allreduces on them, and go through an interrupt and a death.

One process, the *checker*, starts the ranks and gives them one task after the other over their standard input; each answers with a line of
JSON. A task has a bound: a rank that does not answer in time is reported as such, and the rest is left out. The ranks use the planes alone, so no
framework is needed; torch's own NCCL is timed beside them where torch is built for CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from hvdlab._version import __version__
from hvdlab.collectives import context
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, CauseKind, HvdlabError, UnsupportedError
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import links_text, planes_text
from hvdlab.collectives.planes.gpu import gpu_plane, nccl_library
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer, allocated, links_between
from hvdlab.collectives.planes.gpu.staged_plane import PinnedMemory
from hvdlab.collectives.types import PLAIN, DType, OpKind, ReduceOp

FILE = "hvdlab-check-gpus.json"
SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
"""Bytes of the allreduces that are timed."""
ROUNDS, CALLS = 5, 10
"""Rounds in which the contenders take turns, and calls of each round."""
WORK_BYTES = 1 << 24
"""Bytes of the allreduces in the middle of which a rank is interrupted, and another one killed."""
WORK_SECONDS = 1.0
"""Seconds that the ranks work before that."""
ANSWER_WITHIN = 60.0
"""Seconds that a rank may take for a task."""
AGAIN_AFTER = 0.2
"""Seconds after which an interrupted rank withdraws again, if others still wait for it."""
SUM, RIGHT = "sum", "right"

Answers = dict[int, dict[str, Any]]
"""Of each rank the answer to a task."""


# -- a rank ---------------------------------------------------------------------------------------------------------------


class CheckedRank:
    """Rank that is given tasks, on the GPU that its local rank names.

    Args:
        output: Where its answers go.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        context.init()
        self._engine = context.engine()
        gpus = gpu_plane.gpus()
        self._ordinal = self._engine.local_rank % max(1, gpus.count())
        self._device = gpus.open(self._ordinal)
        self._lines = _Lines()
        logging.getLogger("hvdlab").addHandler(self._lines)
        self._torch_error = ""

    def answer(self, found: Mapping[str, Any]) -> None:
        """Send the checker an answer."""
        self._output.write(json.dumps(found) + "\n")
        self._output.flush()

    def run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Do a task and return the answer."""
        tasks: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "gpu": self._describe,
            SUM: self._sum,
            "reach": self._reach,
            "torch": self._begin_torch,
            "time": self._time,
            "work": self._work,
            "withdraw": self._withdraw,
        }
        return tasks[task["task"]](task)

    def _describe(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "ordinal": self._ordinal,
            "identity": self._device.identity,
            "gpus": gpu_plane.gpus().count(),
            "nccl": nccl_library.why_missing() or nccl_library.nccl().version_text,
            "offered": [name for name in registry.offered() if "/" in name],
        }

    def _sum(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Reduce ones, in the next generation if this one ends; the first time this is the check of the plane."""
        started = time.monotonic()
        while True:
            with contextlib.suppress(AbortedError):
                right = self._is_right(self._buffer(1 << 12))
                break
        engine = self._engine
        planes = planes_text((engine.plane_text(), *engine.device_planes()), engine.links())
        return {
            RIGHT: right,
            "seconds": time.monotonic() - started,
            "planes": planes,
            "lines": self._lines.lines,
        }

    def _buffer(self, nbytes: int) -> CudaBuffer:
        with self._device:
            return allocated(self._device, self._ordinal, (nbytes // 4,), DType.F32)

    def _is_right(self, buffer: CudaBuffer) -> bool:
        with self._device:
            memory = PinnedMemory(self._device)
        try:
            with self._device:
                places = memory.places(list(buffer.shape), DType.F32)
                places[0].array[:] = 1
                memory.store(places, [buffer])
            self._allreduce(buffer)
            with self._device:
                memory.fetch([buffer], places)
            return bool((places[0].array == len(self._engine.ranks())).all())
        finally:
            with self._device:
                memory.close()

    def _allreduce(self, buffer: CudaBuffer) -> None:
        name = f"check of {buffer.nbytes} bytes"
        self._engine.run(
            Request(
                OpKind.ALLREDUCE, name, buffer, buffer, DType.F32, PLAIN[ReduceOp.SUM], device=gpu_plane.CUDA
            )
        )

    def _reach(self, task: Mapping[str, Any]) -> dict[str, Any]:
        mine = self._engine.rank
        others = {int(rank): identity for rank, identity in task["gpus"].items() if int(rank) != mine}
        reached = {rank: identity for rank, identity in others.items() if self._device.reaches(identity)}
        links = links_between(self._device.identity, list(reached.values()), list(reached))
        beyond = tuple(rank for rank in others if rank not in reached)
        return {"links": links_text({**links, **({"no peer access": beyond} if beyond else {})})}

    def _begin_torch(self, task: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._contender = _torch_contender(
                task["directory"], self._engine.rank, self._engine.size, self._ordinal
            )
        except Exception as error:  # noqa: BLE001  (any error only leaves out the comparison)
            return {"why": str(error).strip().splitlines()[0] or type(error).__name__}
        return {"why": ""}

    def _time(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the median milliseconds of a call, of this rank."""
        buffer = self._buffer(task["nbytes"])
        calls: dict[str, Callable[[], None]] = {"plane": lambda: self._allreduce(buffer)}
        if task["torch"]:
            calls["torch"] = self._contender(task["nbytes"])
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        # In turns, so that a change of the clocks or of the load meets both alike.
        for _ in range(ROUNDS):
            for name, call in calls.items():
                for _ in range(CALLS):
                    started = time.monotonic()
                    call()
                    times[name].append(1000 * (time.monotonic() - started))
        return {name: statistics.median(found) for name, found in times.items()}

    def _work(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Reduce until an error ends it; return the error, and when it came. Another answer before says that it has begun."""
        try:
            buffer = self._buffer(WORK_BYTES)
            self._allreduce(buffer)
            self.answer({})
            while True:
                self._allreduce(buffer)
        except KeyboardInterrupt as end:
            # Interrupted between two calls, this rank would leave the others waiting for its next one: no cell ends here.
            self._withdraw(task)
            return {"end": type(end).__name__, "at": time.monotonic()}
        except HvdlabError as end:
            return {"end": type(end).__name__, "at": time.monotonic()}

    def _withdraw(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Give up the collectives that the other ranks have begun."""
        self._engine.withdraw("it was interrupted", kind=CauseKind.INTERRUPTED)
        return {}


class _Lines(logging.Handler):
    """Lines that hvdlab logs in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _torch_contender(
    directory: str, rank: int, size: int, ordinal: int
) -> Callable[[int], Callable[[], None]]:
    """Join a group of torch's own NCCL. Return a function that makes a call of its allreduce, for a number of bytes."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise UnsupportedError("this torch is built without CUDA, or sees no GPU")
    torch.cuda.set_device(ordinal)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{directory}/torch",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )

    def contender(nbytes: int) -> Callable[[], None]:
        tensor = torch.zeros(nbytes // 4, device="cuda")

        def call() -> None:
            dist.all_reduce(tensor)
            torch.cuda.synchronize()

        return call

    # torch makes its NCCL communicator at the first collective: an error of that must come here.
    contender(1 << 12)()
    return contender


def rank_main() -> None:
    """Serve the checker, as one of its ranks, until its standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output
    # A shell that starts the checker in the background has it ignore interrupts, which the ranks would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = CheckedRank(answers)
    for line in sys.stdin:
        try:
            found = rank.run(json.loads(line))
        except Exception as error:  # noqa: BLE001  (the checker reports it)
            found = {"error": f"{type(error).__name__}: {error}"}
        rank.answer(found)
    context.shutdown()


# -- the checker ----------------------------------------------------------------------------------------------------------

RANK = (sys.executable, "-c", "from hvdlab.runner.check_gpus import rank_main; rank_main()")
"""The program of a rank."""


class TaskFailed(Exception):
    """Error: a task failed on a rank, or a rank did not answer; the message names the case."""


class NotAnswered(TaskFailed):
    """Error: a rank did not answer in time."""


class Report(Protocol):
    """Receiver of the lines of the table."""

    def __call__(self, title: str, text: str, /) -> None: ...


class GpuRanks:
    """Ranks of the check, and their coordinator.

    Args:
        size: Number of ranks.
        program: Program and arguments of each.
        within: Time limit of a task, in seconds.
    """

    def __init__(self, size: int, program: Sequence[str], within: float) -> None:
        self._within = within
        self._coordinator = CoordinatorProcess.start(size=size)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        #: Bytes of each rank that were read, and belong to later answers.
        self._unread: defaultdict[int, bytearray] = defaultdict(bytearray)
        try:
            for rank in range(size):
                self.processes[rank] = self._started(rank, size, program)
        except BaseException:  # the caller has no object to close yet
            self.close()
            raise

    def _started(self, rank: int, size: int, program: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "HVDLAB_COORDINATOR": self._coordinator.address,
            "HVDLAB_TOKEN": self._coordinator.token,
            "HVDLAB_RANK": str(rank),
            "HVDLAB_SIZE": str(size),
        }
        return subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # Ctrl-C in the terminal reaches the checker alone, which ends the ranks by the end of their
            # input.
            start_new_session=True,
        )

    def ask(self, task: str, **more: Any) -> Answers:
        """Give all ranks a task, and return their answers. Raises ``TaskFailed``."""
        self.give(task, **more)
        return self.answers(task)

    def give(self, task: str, **more: Any) -> None:
        """Give all ranks a task."""
        for rank in self.processes:
            self._give(rank, task, **more)

    def _give(self, rank: int, task: str, **more: Any) -> None:
        pipe = self.processes[rank].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # its answer is missing then
            pipe.write(json.dumps({"task": task, **more}).encode() + b"\n")
            pipe.flush()

    def answers(self, task: str) -> Answers:
        """Wait for the answers of all ranks. Raises ``TaskFailed`` if one is missing after the bound, or has an error."""
        end = time.monotonic() + self._within
        return {rank: self._answer(rank, task, end) for rank in self.processes}

    def _answer(self, rank: int, task: str, end: float) -> dict[str, Any]:
        """Return the next answer of a rank. Raises ``TaskFailed`` if it is an error, or has not come at this instant."""
        process = self.processes[rank]
        assert process.stdout is not None
        # Bytes that were read ahead come first: of those, select() knows nothing.
        unread = self._unread[rank]
        while b"\n" not in unread:
            readable, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise NotAnswered(f"rank {rank} did not answer within {self._within:g} s ({task})")
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                raise TaskFailed(f"rank {rank} ended with exit code {process.wait()} ({task})")
            unread += data
        line, _, self._unread[rank] = unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise TaskFailed(f"rank {rank}: {found['error']} ({task})")
        return found

    def answers_after_interrupt(self, interrupted: int, task: str) -> Answers:
        """Wait for the answers of all ranks to a task that one of them was interrupted in. Raises ``TaskFailed`` as :meth:`answers`.

        A rank that is between two collectives when the interrupted one withdraws begins the next one in vain. So that one withdraws again as
        long as another one has not answered.
        """
        end = time.monotonic() + self._within
        found = {interrupted: self._answer(interrupted, task, end)}
        for rank in self.processes:
            while rank not in found:
                try:
                    found[rank] = self._answer(rank, task, min(end, time.monotonic() + AGAIN_AFTER))
                except NotAnswered:
                    if time.monotonic() >= end:
                        raise
                    self._give(interrupted, "withdraw")
                    self._answer(interrupted, "withdraw", end)
        return found

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank; one that is killed is no rank any more."""
        self.processes[rank].send_signal(number)
        if number == signal.SIGKILL:
            process = self.processes.pop(rank)
            self._unread.pop(rank, None)
            process.wait()
            _close_pipes(process)

    def close(self) -> None:
        """End the ranks, those that don't end by themselves within two seconds by SIGKILL."""
        for process in self.processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        end = time.monotonic() + 2.0
        for process in self.processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_pipes(process)
        self._coordinator.close()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def check(ranks: GpuRanks, directory: str, report: Report) -> dict[str, Any]:
    """Check the GPUs of some ranks.

    Args:
        ranks: The ranks.
        directory: An empty directory for files of the ranks.
        report: Gets each line of the table as soon as it is known.

    Returns:
        All that was found, for a file; ``failed`` names the error, or is empty.
    """
    found: dict[str, Any] = {"hvdlab": __version__, "failed": ""}
    try:
        _check_planes(ranks, found, report)
        _time_allreduce(ranks, directory, found, report)
        _interrupt(ranks, found, report)
        _kill(ranks, found, report)
    except TaskFailed as failure:
        found["failed"] = str(failure)
        report("failed", str(failure))
    return found


def _check_planes(ranks: GpuRanks, found: dict[str, Any], report: Report) -> None:
    gpus = found["gpus"] = ranks.ask("gpu")
    for rank, gpu in gpus.items():
        planes = ", ".join(gpu["offered"]) or "no plane for CUDA tensors"
        report(
            f"rank {rank}",
            f"GPU {gpu['ordinal']} of {gpu['gpus']} ({gpu['identity'][:8]}); {planes}; NCCL {gpu['nccl']}",
        )
    everyone = {rank: gpu["identity"] for rank, gpu in gpus.items()}
    for rank, answer in ranks.ask("reach", gpus=everyone).items():
        gpus[rank]["links"] = answer["links"]
        report(f"rank {rank} reaches", answer["links"])
    checked = found["check"] = ranks.ask(SUM)
    slowest = max(answer["seconds"] for answer in checked.values())
    report("check", f"{checked[0]['planes']}, in {slowest:.1f} s")
    for answer in checked.values():
        for line in answer["lines"]:
            report("", line)
    _require_right(checked, "the first allreduce")


def _require_right(answers: Answers, name: str) -> None:
    wrong = [rank for rank, answer in answers.items() if not answer[RIGHT]]
    if wrong:
        raise TaskFailed(f"{name} gave wrong numbers on ranks {wrong}")


def _time_allreduce(ranks: GpuRanks, directory: str, found: dict[str, Any], report: Report) -> None:
    reasons = [answer["why"] for answer in ranks.ask("torch", directory=directory).values() if answer["why"]]
    found["torch"] = reasons[0] if reasons else ""
    if reasons:
        report("torch's NCCL", f"left out: {reasons[0]}")
    found["allreduce"] = {}
    members = len(ranks.processes)
    for size, nbytes in SIZES.items():
        answers = ranks.ask("time", nbytes=nbytes, torch=not reasons)
        slowest = {name: max(answer[name] for answer in answers.values()) for name in answers[0]}
        found["allreduce"][size] = slowest
        moved = 2 * (members - 1) / members * nbytes  # bytes that a ring sends over each link
        report(
            f"allreduce {size}",
            ", ".join(
                f"{'hvdlab' if name == 'plane' else 'torch NCCL'} {ms:.3f} ms ({moved / ms / 1e6:.2f} GB/s)"
                for name, ms in slowest.items()
            ),
        )


def _work(ranks: GpuRanks, rank: int, number: int, name: str) -> dict[str, Any]:
    """Send a rank a signal in the middle of allreduces; return when the last of the ranks was free, and whether they work on."""
    ranks.ask("work")  # the first of its two answers
    time.sleep(WORK_SECONDS)
    sent = time.monotonic()
    ranks.signal(rank, number)
    ends = ranks.answers(name) if number == signal.SIGKILL else ranks.answers_after_interrupt(rank, name)
    again = ranks.ask(SUM)
    _require_right(again, f"the allreduce after the {name}")
    return {
        "free_after": max(end["at"] for end in ends.values()) - sent,
        "planes": again[min(again)]["planes"],
        "ends": ends,
    }


def _interrupt(ranks: GpuRanks, found: dict[str, Any], report: Report) -> None:
    one = found["interrupt"] = _work(ranks, 0, signal.SIGINT, "interrupt")
    report("interrupt", f"all ranks were free after {one['free_after']:.2f} s, and work on: {one['planes']}")


def _kill(ranks: GpuRanks, found: dict[str, Any], report: Report) -> None:
    if len(ranks.processes) < 2:
        return
    one = found["death"] = _work(ranks, max(ranks.processes), signal.SIGKILL, "death")
    report("death", f"the others were free after {one['free_after']:.2f} s, and work on: {one['planes']}")


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code is 0 if all went well, otherwise 1."""
    parser = argparse.ArgumentParser("hvdlab check-gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-np", type=int, help="ranks; by default one for each GPU, and two for a single one")
    parser.add_argument("--json", type=Path, default=Path(FILE), help=f"file for what is found ({FILE})")
    options = parser.parse_args(arguments)
    reason = gpu_plane.why_off() or gpu_plane.gpus().why_unusable()
    if reason is not None:
        print(f"There is nothing to check: {reason}")
        return 1
    size = options.np or max(2, gpu_plane.gpus().count())
    return run(size, RANK, options.json)


def run(size: int, program: Sequence[str], file: Path, within: float = ANSWER_WITHIN) -> int:
    """Check with ``size`` ranks of a program, print the table, and write the file; the exit code is 0 if all went well, otherwise 1."""

    def report(title: str, text: str, /) -> None:
        print(f"{title:<18} {text}", flush=True)

    ranks = GpuRanks(size, program, within)
    try:
        with tempfile.TemporaryDirectory() as directory:
            found = check(ranks, directory, report)
    finally:
        ranks.close()
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report("file", str(file))
    return 1 if found["failed"] else 0
