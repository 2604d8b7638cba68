"""Run everything that needs a real GPU, in pieces of less than ten minutes, each with a limit of its own: 25 minutes at most, on one GPU.

    python benchmarks/gpu_suite.py                       # all pieces, one after the other
    python benchmarks/gpu_suite.py --list                # print the pieces, their limits, and their results so far
    python benchmarks/gpu_suite.py --minutes 9.5         # begin no piece that might not end in that time
    python benchmarks/gpu_suite.py --from tests          # go on with this one and those behind it
    python benchmarks/gpu_suite.py --piece watched       # this one only; may be given several times
    python benchmarks/gpu_suite.py --rehearse --small    # without a GPU: Gloo in NCCL's place, simulated GPUs; sizes for a minute or two

A piece that fails, or is ended at its limit, does not stop those behind it. The output directory (``--out``) has ``NAME.json``
and ``NAME.log`` of each piece, and ``summary.md`` of all pieces that have run there. ``--archive FILE`` packs the directory after each piece, so that
one file is enough to take away. The exit code is 0 if each chosen piece has passed, otherwise 1.

The suite installs and fetches nothing. Its first piece, ``machine``, lists within seconds the packages that the other pieces will miss.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
OURS = (str(ROOT / "src"), str(ROOT / "tests"))
"""Where this program and its commands find hvdlab and its tests."""
sys.path[:0] = OURS

from chaos import census

Found = dict[str, Any]
"""Contents of a JSON file."""
GRACE = 10.0
"""Seconds that a piece has to end by itself once it was interrupted at its limit."""
MARK = "GPU_SUITE_PIECE"
"""Environment variable that marks the processes of a piece: a process whose parent has ended is found by it as well."""
TAIL = 4000
"""Characters of a piece's output that its JSON file keeps."""
STEP_GOAL = 1.02
"""How many times as long a small training step may take on a watched group as on torch's own."""
SMALL_STEP = "small training step"
"""Beginning of the small step's name in the result of ``c10d.py``."""
PASSED, FAILED, OVER = "passed", "failed", "over its limit"

PYTEST = "{python} -m pytest -rs -p no:cacheprovider --junitxml {junit}"
CHAOS = "{python} benchmarks/chaos.py --without-views --json {json}"
WATCHED_FAULTS = (
    "skips",
    "another collective",
    "another shape",
    "raises",
    "wait in C++",
    "SIGKILL",
    "lack what a cell needs",
)
"""Words of the faults that ``watched`` plays once each: a skip, two mismatches, an exception, an interrupt, deaths, and a resize."""
_ONE_OF_EACH = " ".join(f"--fault '{word}'" for word in WATCHED_FAULTS)


class Piece(NamedTuple):
    """One piece.

    Attributes:
        about: Its subject, for the list and the summary.
        limit: Seconds after which it is ended.
        command: Its words, with the names of files and sizes in braces.
        rehearsal: The same without a GPU.
    """

    about: str
    limit: float
    command: str
    rehearsal: str


# Those first that have never run on a GPU.
PIECES = {
    "machine": Piece(
        "the machine, and the packages that the other pieces need",
        30,
        "{python} benchmarks/gpu_suite.py --machine --json {json}",
        "{python} benchmarks/gpu_suite.py --machine --rehearse --json {json}",
    ),
    "check-gpus": Piece(
        "`hvdlab check-gpus`: the check, allreduces, an interrupt, a death",
        80,
        "{python} -m hvdlab check-gpus --json {json}",
        "{python} -m support.fakes.checked_gpus --json {json}",
    ),
    "training": Piece(
        "DDP and FSDP2 on a watched group come to the losses of one process",
        90,
        f"{PYTEST} tests/integration/torch/test_c10d_watched_training.py -k nccl",
        f"{PYTEST} tests/integration/torch/test_c10d_watched_training.py -k gloo",
    ),
    "failed-check": Piece(
        "a plane that fails its check: one sentence, and on through the host",
        60,
        f"{PYTEST} tests/gpu/test_checked.py -k fails",
        f"{PYTEST} tests/integration/collectives/planes/test_gpu_checked.py -k after_a_check_that_fails",
    ),
    "watched": Piece(
        "watched groups: skip, mismatches, exception, interrupt, SIGKILL and resize, after which the same DDP trains on",
        170,
        f"{CHAOS} --watched nccl --ranks 3 --count {{watched}} --minutes 2.5 {_ONE_OF_EACH}",
        f"{CHAOS} --watched gloo --ranks 3 --count {{watched}} --minutes 2.5 {_ONE_OF_EACH}",
    ),
    "tests": Piece(
        "tests/gpu",
        270,
        f"{PYTEST} -n 4 tests/gpu",
        f"{PYTEST} tests/gpu tests/unit/collectives/planes/test_gpu_nccl.py",
    ),
    "watched-cost": Piece(
        "what watching adds to collectives and small training steps of torch's own NCCL; of a step at most 2 %",
        80,
        "{python} -m hvdlab run -np 2 {python} benchmarks/c10d.py --watched nccl --blocks {blocks} --json {json}",
        "{python} -m hvdlab run -np 2 {python} benchmarks/c10d.py --watched gloo --blocks {blocks} --only small --json {json}",
    ),
    "plane-cost": Piece(
        "latency and bandwidth of the plane of ranks that share a GPU, beside torch's NCCL",
        100,
        "{python} benchmarks/on_gpus.py --sizes-only --ranks 2 --ranks 4 --sizes {sizes} --json {json}",
        "{python} benchmarks/on_gpus.py --sizes-only --device cpu --ranks 2 --sizes {sizes} --json {json}",
    ),
    "nccl-cost": Piece(
        "the same of hvdlab's plane over NCCL, where ranks are made to look like hosts",
        80,
        "{python} benchmarks/on_gpus.py --sizes-only --plane nccl --ranks 2 --sizes {sizes} --json {json}",
        "{python} benchmarks/on_gpus.py --sizes-only --device cpu --plane nccl --ranks 2 --sizes {sizes} --json {json}",
    ),
    "restarts": Piece(
        "a rank that is started anew again and again, with the stacks of those that crash",
        110,
        "{python} benchmarks/restarts.py --device cuda --count {restarts} --minutes 1.4 --json {json}",
        "{python} benchmarks/restarts.py --device cpu --count {restarts} --minutes 1.4 --json {json}",
    ),
    "chaos": Piece(
        "200 faults on ranks that share a GPU, or as many as its time allows",
        150,
        f"{CHAOS} --gpu {{faults}} --minutes 2",
        f"{CHAOS} --gpu {{faults}} --device cpu --minutes 2",
    ),
    "watched-chaos": Piece(
        "faults on watched groups, as many as its time allows",
        150,
        f"{CHAOS} --watched nccl --ranks 4 --seed 2 --count {{faults}} --minutes 2",
        f"{CHAOS} --watched gloo --ranks 2 --seed 2 --count {{faults}} --minutes 2",
    ),
}

SIZES: dict[str, dict[str, object]] = {
    "full": {
        "watched": 9,
        "blocks": 8,
        "sizes": "4K,64K,1M,16M,64M",
        "restarts": 300,
        "faults": 200,
    },
    "small": {"watched": 1, "blocks": 1, "sizes": "4K", "restarts": 2, "faults": 1},
}
"""The sizes that the commands ask for, without and with ``--small``."""


# -- one piece ------------------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """End of a command.

    Attributes:
        exit_code: Its exit code; negative for a signal.
        seconds: Time that it has run for.
        is_over: Whether it was ended at its limit.
        left: Processes that it left behind, which were killed: name by number.
    """

    exit_code: int
    seconds: float
    is_over: bool
    left: dict[int, str]


def run_within(words: Sequence[str], limit: float, log: Path, grace: float = GRACE) -> Ended:
    """Run a command from the root of the repository, and end it and all its processes at its limit.

    Args:
        words: Program and arguments.
        limit: Seconds after which it is interrupted.
        log: File for its output.
        grace: Seconds that it has to end by itself after that, and its processes once it has ended.
    """
    mark = secrets.token_hex(8)
    path = os.pathsep.join(filter(None, [*OURS, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        MARK: mark,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    begun, is_over = time.monotonic(), False
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )  # fmt: skip
        try:
            process.wait(limit)
            census.settled(lambda: bool(census.marked(mark, MARK)), grace)
        except subprocess.TimeoutExpired:
            is_over = True
            _end(process, grace)
        except BaseException:
            _end(process, grace)
            raise
        finally:
            left = census.marked(mark, MARK)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, signal.SIGKILL)
            # The next piece has the GPU to itself.
            census.settled(lambda: bool(census.marked(mark, MARK)), GRACE)
    return Ended(process.returncode, round(time.monotonic() - begun, 1), is_over, left)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt a command, as Ctrl-C does, so that it reports as much as it can; kill it if it does not end."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def play(
    name: str, piece: Piece, out: Path, sizes: Mapping[str, object], *, rehearse: bool, slow: float = 1.0
) -> Found:
    """Run a piece, and write its JSON file and its log. Returns the contents of the former."""
    own, junit, log = out / f".{name}.own.json", out / f".{name}.xml", out / f"{name}.log"
    for file in (own, junit):
        file.unlink(missing_ok=True)
    places = {"python": sys.executable, "json": own.absolute(), "junit": junit.absolute(), **sizes}
    words = [word.format(**places) for word in shlex.split(piece.rehearsal if rehearse else piece.command)]
    ended = run_within(words, piece.limit * slow, log)
    result = result_of(own, junit)
    for file in (own, junit):
        file.unlink(missing_ok=True)
    found: Found = {
        "piece": name,
        "about": piece.about,
        "verdict": verdict(ended, result),
        "exit_code": ended.exit_code,
        "seconds": ended.seconds,
        "limit_s": piece.limit * slow,
        "left_processes": ended.left,
        "command": shlex.join(words),
        "rehearsed": rehearse,
        "result": result,
        "output_tail": log.read_text(errors="replace")[-TAIL:],
    }
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def verdict(ended: Ended, result: Found | None) -> str:
    """Return whether a piece has passed. One that has written no result has not, nor has one of whose tests none has run."""
    if ended.is_over:
        return OVER
    has_run = result is not None and result.get("passed", 1) > 0
    return PASSED if ended.exit_code == 0 and has_run and not ended.left else FAILED


def result_of(own: Path, junit: Path) -> Found | None:
    """Return the result that a piece has written; ``None`` if there is none, or if its end came while it wrote."""
    try:
        if own.exists():
            found: Found = json.loads(own.read_text())
            return found
        return of_tests(junit) if junit.exists() else None
    except (ValueError, ElementTree.ParseError):
        return None


def of_tests(junit: Path) -> Found:
    """Return the numbers of tests that have passed, failed and were skipped, and the names of those that failed."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "names_of_failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


# -- the machine ----------------------------------------------------------------------------------------------------------

BESIDE = ("torch", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "cryptography")
"""Packages that pieces need beside those of ``pyproject.toml``'s dependencies and its extra for GPUs."""


def missing_packages(*, rehearse: bool) -> list[str]:
    """Return the packages that this interpreter lacks, or has too old a version of. Of those that others need, only absence counts."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *BESIDE]
    if not rehearse:
        lines += project["optional-dependencies"]["gpu"]
    missing: list[str] = []
    seen: set[str] = set()
    ours = {Requirement(line).name for line in lines}
    while lines:
        required = Requirement(lines.pop(0))
        if required.name in seen or (required.marker and not required.marker.evaluate({"extra": ""})):
            continue
        seen.add(required.name)
        try:
            version = importlib.metadata.version(required.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(str(required))
            continue
        if required.name in ours and not required.specifier.contains(version, prereleases=True):
            missing.append(f"{required} (found {version})")
        lines += importlib.metadata.requires(required.name) or []
    return missing


def machine(*, rehearse: bool) -> Found:
    """Return a description of this machine; ``wrong`` says why the pieces can't run on it, or is empty."""
    missing = missing_packages(rehearse=rehearse)
    found: Found = {"python": platform.python_version(), "cores": os.cpu_count(), "missing": missing}
    wrong = [f"missing: {', '.join(missing)}"] if missing else []
    if not any(text.startswith("torch") for text in missing):
        import torch
        import torch.distributed as dist

        gpus = range(torch.cuda.device_count())
        found |= {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
            "gpus": [torch.cuda.get_device_name(each) for each in gpus],
        }
        if not gpus and not rehearse:
            wrong.append("torch sees no GPU")
    return found | {"wrong": wrong}


def main_of_machine(file: Path, *, rehearse: bool) -> int:
    """Describe the machine in a file. The exit code is 0 if the pieces can run on it."""
    found = machine(rehearse=rehearse)
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(*(found["wrong"] or ["all packages are there"]), sep="\n")
    return bool(found["wrong"])


# -- the summary ----------------------------------------------------------------------------------------------------------


def figures(result: Found) -> list[str]:
    """Return the lines of the summary about a piece's own result."""
    if "passed" in result:
        text = f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
        return [text, *result["names_of_failed"]]
    if result.get("benchmark") == "chaos":
        bad = [f"{story['fault']} (number {story['number']})" for story in result["not_well"]]
        return [f"{result['faults']} faults, {len(bad)} of them not well", *bad]
    if result.get("benchmark") == "restarts":
        crashes = [f"restart {crash['number']} of rank {crash['rank']}: {crash['error']}" for crash in result["crashes"]]  # fmt: skip
        return [f"{result['restarts']} restarts, {len(crashes)} crashes", *crashes]
    if "microseconds" in result:
        goals = {
            name: f", at most {STEP_GOAL} is the goal"
            for name in result["microseconds"]
            if name.startswith(SMALL_STEP)
        }
        return [
            f"{name}: {row['ratio']:.3f} times as long{goals.get(name, '')}"
            for name, row in result["microseconds"].items()
        ]
    if "wrong" in result:
        return [
            f"torch {result.get('torch')}, NCCL {result.get('nccl')}, {result.get('gpus')}",
            *result["wrong"],
        ]
    if "failed" in result:  # check-gpus
        ends = [
            f"{name}: the others were free after {result[name]['free_after']:.2f} s"
            for name in ("interrupt", "death")
            if name in result
        ]
        return [*_milliseconds(result.get("allreduce", {})), *ends, *filter(None, [result["failed"]])]
    return [line for ranks, rows in result.items() for line in _milliseconds(rows, f"{ranks} ranks, ")]


def _milliseconds(rows: Mapping[str, Mapping[str, float]], before: str = "") -> list[str]:
    return [
        f"{before}{name}: {', '.join(f'{who} {ms:.3f} ms' for who, ms in row.items())}"
        for name, row in rows.items()
    ]


def summary(out: Path) -> str:
    """Return the text about all pieces that have run in this directory."""
    rows, parts = [], []
    for name, piece in PIECES.items():
        found = earlier(out, name)
        if found is None:
            rows.append(f"| {name} | not run | | {piece.limit:g} s | {piece.about} |")
            continue
        kind = found["verdict"] + (", rehearsed" if found["rehearsed"] else "")
        rows.append(f"| {name} | {kind} | {found['seconds']:g} s | {found['limit_s']:g} s | {found['about']} |")  # fmt: skip
        lines = [f"* {line}" for line in figures(found["result"])] if found["result"] else []
        if found["left_processes"]:
            lines.append(f"* left behind: {', '.join(found['left_processes'].values())}")
        if found["verdict"] != PASSED:
            lines += ["", "```", *found["output_tail"].splitlines()[-30:], "```"]
        if lines:
            parts += ["", f"## {name}", "", *lines]
    head = ["| piece | verdict | time | limit | |", "|---|---|--:|--:|---|"]
    return "\n".join(["# Everything that needs a GPU", "", *head, *rows, *parts, ""])


def earlier(out: Path, name: str) -> Found | None:
    """Return the result of a piece that has run in this directory, or ``None``."""
    file = out / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def keep(out: Path, archive: Path | None) -> None:
    """Write the summary, and the archive if there is to be one. An archive that is there stays until the new one is whole."""
    (out / "summary.md").write_text(summary(out))
    if archive is not None:
        unfinished = archive.with_name(f".{archive.name}")
        with tarfile.open(unfinished, "w:gz") as packed:
            packed.add(out, arcname=out.name)
        unfinished.replace(archive)


# -- all of them ----------------------------------------------------------------------------------------------------------


def play_all(names: Sequence[str], options: argparse.Namespace) -> int:
    """Run pieces one after the other. The exit code is 0 if all have passed."""
    out, end = options.out, time.monotonic() + 60 * options.minutes
    out.mkdir(parents=True, exist_ok=True)
    sizes = SIZES["small" if options.small else "full"]
    verdicts: list[str] = []
    for name in names:
        piece = PIECES[name]
        if time.monotonic() + piece.limit * options.slow + GRACE > end:
            print(f"The time is over; go on with --from {name}", flush=True)
            break
        print(f"== {name}: {piece.about} ({piece.limit * options.slow:g} s at most)", flush=True)
        found = play(name, piece, out, sizes, rehearse=options.rehearse, slow=options.slow)
        keep(out, options.archive)
        verdicts.append(found["verdict"])
        print(f"   {found['verdict']} after {found['seconds']:g} s", flush=True)
        for line in figures(found["result"]) if found["result"] else []:
            print(f"   {line}", flush=True)
        if found["verdict"] != PASSED:
            print(*found["output_tail"].splitlines()[-15:], sep="\n", flush=True)
    print(f"{verdicts.count(PASSED)} of {len(names)} pieces have passed: {out / 'summary.md'}", flush=True)
    return verdicts.count(PASSED) != len(names)


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the pieces that the command line asks for, in their order."""
    names = list(PIECES)
    if options.first:
        names = names[names.index(options.first) :]
    return [name for name in names if not options.piece or name in options.piece]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--piece", action="append", choices=PIECES, help="run this one only; may be given several times")  # fmt: skip
    parser.add_argument("--from", dest="first", choices=PIECES, help="run this one and those behind it")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no piece that might not end within them")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="directory for the results (out/gpu)")  # fmt: skip
    parser.add_argument("--archive", type=Path, help="also pack that directory into this .tar.gz after each piece")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: Gloo in NCCL's place, and simulated GPUs")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="the least of everything, to see that it runs")
    parser.add_argument("--slow", type=float, default=1.0, metavar="TIMES", help="limits times this, where little runs at once")  # fmt: skip
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.machine:
        return main_of_machine(options.json, rehearse=options.rehearse)
    names = chosen(options)
    if options.list:
        for name in names:
            found = earlier(options.out, name)
            print(f"{name:14} {PIECES[name].limit:4g} s  {found['verdict'] if found else 'not run':15} {PIECES[name].about}")  # fmt: skip
        return 0
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells start background processes so, and every rank that a piece interrupts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return play_all(names, options)
    except KeyboardInterrupt:
        keep(options.out, options.archive)
        print(f"interrupted: {options.out / 'summary.md'}")
        return 130
    finally:
        signal.signal(signal.SIGTERM, usual)


if __name__ == "__main__":
    sys.exit(main())
