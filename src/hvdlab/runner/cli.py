"""The command line ``hvdlab``: which command is called, and ``hvdlab run`` from its arguments to a job.

``hvdlab run --check-build`` reports the abilities of this installation here, found by trials. With ``hvdlab run --mpi`` this
process becomes mpiexec, which starts the ranks; they find each other through MPI.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hvdlab._version import __version__
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError, UnsupportedError
from hvdlab.collectives.text import visible_lines
from hvdlab.launch.command import excluded_by_user
from hvdlab.launch.options import parse as parse_options
from hvdlab.runner.flags import FLAGS, LEVELS, Flag, FlagKind
from hvdlab.runner.options import MPI, RunOptions, read_config
from hvdlab.runner.output import ConsoleSink, FileSink, Sink, Writer

if TYPE_CHECKING:
    from hvdlab.runner.job_spec import JobSpec

USAGE = "hvdlab run -np N [flags] program [arguments]"
HELP = f"""usage: hvdlab COMMAND

  run            {USAGE.removeprefix("hvdlab run ")}: run a program on several ranks (`hvdlab run --help`)
  trace          save | summary | top: what ranks did (`hvdlab trace --help`)
  trace check    [--killed] FILE...: check timelines for mistakes
  pools          [stop NAME...]: list the pools that notebooks have left running, or end some
  check-gpus     [-np N] [--json FILE]: try the GPUs of this machine, and write what is found to a file
  --version      print the version
"""
WRONG_CALL = 2
"""Exit code for wrong arguments, as argparse has it."""
COMMANDS = {
    "trace check": "hvdlab.runner.check_trace",
    "trace": "hvdlab.kernel_ext.notebook.trace_file",
    "pools": "hvdlab.kernel_ext.notebook.kept_pools",
    "check-gpus": "hvdlab.runner.check_gpus",
}
"""Modules with a command of other packages: a function ``main`` from arguments to an exit code.

They are imported when the command is called: ``hvdlab run`` must start without what notebooks need.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``hvdlab``; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(given)
    except (InvalidRequestError, UnsupportedError) as error:
        print(f"hvdlab: {visible_lines(str(error))}", file=sys.stderr)
        return WRONG_CALL
    except HvdlabError as error:
        print(f"hvdlab: {visible_lines(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        _close_output()


def horovodrun() -> int:
    """Run the console script ``hvdlab-horovodrun``: ``hvdlab run`` under a name like horovodrun's."""
    return main(["run", *sys.argv[1:]])


def _dispatch(given: list[str]) -> int:
    match given:
        case ["run", *rest]:
            return run(rest)
        case ["trace", "check", *rest]:
            return _call("trace check", rest)
        case ["trace" | "pools" | "check-gpus" as name, *rest]:
            return _call(name, rest)
        case ["--version" | "-v"]:
            print(__version__)
            return 0
        case ["--help" | "-h"]:
            print(HELP, end="")
            return 0
        case _:
            print(HELP, end="", file=sys.stderr)
            return WRONG_CALL


def _call(name: str, arguments: Sequence[str]) -> int:
    """Import another package's command and run it; returns the exit code."""
    return int(import_module(COMMANDS[name]).main(arguments))


def run(arguments: Sequence[str]) -> int:
    """Run ``hvdlab run``: the exit code is that of the rank that failed first, or 0."""
    given, command = parse(arguments)
    if given.get("version"):
        print(__version__)
        return 0
    if given.get("check_build"):
        print(build_report())
        return 0
    config = read_config(Path(given["config_file"])) if "config_file" in given else {}
    options = RunOptions(given, config, os.environ)
    if not command:
        raise InvalidRequestError(f"there is no program to run; usage: {USAGE}")
    out, err = Writer(sys.stdout), Writer(sys.stderr)
    for warning in options.warnings():
        err.say(warning)
    job = options.job(command, stdin=_reads_stdin())
    if job.launcher == MPI:
        parse_options(MPI, (), job.launcher_options)  # mpiexec has --mpi-args
        replace_process(job, options)
    from hvdlab.runner.job import JobRun

    directory = options.get("output_filename")
    sink: Sink
    if directory:
        sink = FileSink(Path(directory), job.size)
    else:
        sink = ConsoleSink(out, err, timestamp=bool(options.get("prefix_output_with_timestamp")))
    return JobRun(job, sink, err, verbose=bool(options.get("verbose"))).run().code


def _reads_stdin() -> bool:
    """Return whether rank 0 reads our standard input: only if it is no terminal, as ranks are not in a terminal's foreground."""
    try:
        return not os.isatty(0)
    except OSError:
        return False


def _close_output() -> None:
    """Flush the standard streams: a reader that is gone (``| head``) is no error worth a traceback at exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            with contextlib.suppress(OSError):
                # The interpreter flushes once more at its exit, and would report the broken pipe then.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


Line = tuple[str, str]
"""What there is, and why it can't be used (empty if it can)."""

# Planes and mpiexec are imported where they are needed: they import numpy, and `hvdlab pools` needs none of it.


def build_report() -> str:
    """Return the report, in the layout of horovodrun's."""
    sections = {
        "Available Frameworks": _frameworks(),
        "Available Controllers": _controllers(),
        "Available Tensor Operations": _planes(),
    }
    lines = [f"hvdlab v{__version__}:", ""]
    for title, found in sections.items():
        lines.append(f"{title}:")
        lines += [
            f"    [{' ' if reason else 'X'}] {name}" + (f": {reason}" if reason else "")
            for name, reason in found
        ]
        lines.append("")
    return "\n".join(lines).rstrip()


def _frameworks() -> Iterator[Line]:
    yield "PyTorch", "" if importlib.util.find_spec("torch") else "pip install 'hvdlab[torch]'"
    yield "NumPy", ""
    for name, module in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
        there = importlib.util.find_spec(f"hvdlab.{module}") is not None
        yield name, "" if there else "hvdlab has no binding for it"
    yield (
        "MXNet",
        "" if importlib.util.find_spec("mxnet") else "pip install mxnet==1.9.1 numpy==1.23.5, on Python 3.11",
    )


def _controllers() -> Iterator[Line]:
    from hvdlab.launch import mpi

    yield "hvdlab run, on this host", ""
    yield "hvdlab run, on other hosts by ssh", _ssh()
    yield "MPI (mpiexec)", mpi.why_unavailable()
    for program in ("srun", "torchrun"):
        found = shutil.which(program) or Path(sys.executable).with_name(program).exists()
        yield f"{program} python train.py", "" if found else f"`{program}` is not on the PATH"


def _ssh() -> str:
    if shutil.which("ssh") is None:
        return "`ssh` is not on the PATH"
    return "" if importlib.util.find_spec("cryptography") else "TLS needs pip install 'hvdlab[tls]'"


def _planes() -> Iterator[Line]:
    from hvdlab.collectives.planes import registry
    from hvdlab.launch import mpi

    names = [name for name in registry.names() if name not in ("local", "mpi")]
    for name in names:
        yield name, registry.why_unavailable(name) or ""
    yield "mpi", mpi.why_unavailable()
    for name in ("cuda/ipc", "cuda/nccl"):
        yield name, registry.why_unavailable(name) or ""


def parser() -> argparse.ArgumentParser:
    """Return a parser whose values are ``None`` for options that were not given."""
    found = argparse.ArgumentParser(
        "hvdlab run",
        usage=USAGE,
        description="Run a program on several ranks. Takes horovodrun's flags.",
        allow_abbrev=False,
    )
    groups = {name: found.add_argument_group(name) for name in dict.fromkeys(flag.group for flag in FLAGS)}
    for flag in FLAGS:
        # argparse expands each % in a help text.
        help = f"no effect here: {flag.ineffective}" if flag.ineffective else flag.meaning
        groups[flag.group].add_argument(
            *flag.names, dest=flag.dest, default=None, help=help.replace("%", "%%"), **_takes(flag)
        )
        if flag.off:
            groups[flag.group].add_argument(
                *flag.off, dest=flag.dest, action="store_const", const=False, help=f"undoes {flag.name}"
            )
    found.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return found


def _takes(flag: Flag) -> dict[str, Any]:
    match flag.kind:
        case FlagKind.SWITCH:
            return {"action": "store_const", "const": True}
        case FlagKind.NUMBER:
            return {"type": int, "metavar": "N"}
        case FlagKind.REAL:
            return {"type": float, "metavar": "X"}
        case FlagKind.LEVEL:
            return {"type": str.upper, "choices": LEVELS, "metavar": "LEVEL"}
        case FlagKind.TWO:
            return {"type": int, "nargs": 2, "metavar": ("LEAST", "MOST")}
        case FlagKind.TEXTS:
            return {"action": "append", "metavar": "TEXT"}
        case FlagKind.TEXT:
            return {"metavar": "TEXT"}


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the given flags by dest, and the command.

    Raises:
        SystemExit: The arguments can't be parsed (2), or contain ``--help`` (0).
    """
    given = vars(parser().parse_args(arguments))
    command = given.pop("command")
    # argparse leaves the separator in a remainder.
    if command[:1] == ["--"]:
        del command[0]
    return {dest: value for dest, value in given.items() if value is not None}, command


def mpiexec_command(job: JobSpec, options: RunOptions) -> tuple[list[str], dict[str, str]]:
    """Return the command line of mpiexec, and its environment.

    Raises:
        StartError: There is no mpiexec.
    """
    from hvdlab.launch import mpi

    mpiexec = mpi.program()
    if mpiexec is None:
        raise StartError("--mpi: " + mpi.why_unavailable() + "; `pip install mpich mpi4py` brings it.")
    ours = {**job.environment, "HVDLAB_PLANE": job.plane}
    line = [mpiexec, "-np", str(job.size)]
    line += mpi.arguments(mpiexec, job.hosts if lists_hosts(job) else (), ours)
    line += _labels(job, options, open_mpi=mpi.is_open_mpi(mpi.version(mpiexec)))
    for dest in ("mpi_args", "binding_args"):
        line += shlex.split(options.get(dest) or "")
    kept_here = excluded_by_user(os.environ) if job.remote else ()
    passed_on = {name: value for name, value in os.environ.items() if name not in kept_here}
    return [*line, *job.command], {"PYTHONUNBUFFERED": "1", **passed_on, **ours}


def lists_hosts(job: JobSpec) -> bool:
    """Return whether mpiexec needs a list of hosts on its command line."""
    return len(job.hosts) > 1 or bool(job.remote)


def _labels(job: JobSpec, options: RunOptions, *, open_mpi: bool) -> list[str]:
    """Return the options that mark each rank's output with its number, or write it to files of its own."""
    directory = options.get("output_filename")
    if open_mpi:
        return ["--output-filename", directory] if directory else ["--tag-output"]
    if not directory:
        return ["-prepend-rank"]
    for rank in range(job.size):
        Path(directory, f"rank.{rank}").mkdir(parents=True, exist_ok=True)
    place = f"{directory}/rank.%r"
    return ["-outfile-pattern", f"{place}/stdout", "-errfile-pattern", f"{place}/stderr"]


def replace_process(job: JobSpec, options: RunOptions) -> NoReturn:
    """Become mpiexec. Raises ``StartError`` if there is none."""
    line, environment = mpiexec_command(job, options)
    # execve() drops the bytes that are still in the buffers of this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(line[0], line, environment)
