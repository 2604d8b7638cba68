"""The console script ``hvdlab``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hvdlab
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, UnsupportedError
from hvdlab.collectives.text import visible_coloured, visible_lines
from hvdlab.launch.options import parse as parse_options
from hvdlab.runner.arguments import USAGE, parse
from hvdlab.runner.config import read_config
from hvdlab.runner.sinks import ConsoleSink, FileSink, Sink, Writer
from hvdlab.runner.wishes import MPI, Wishes

HELP = f"""usage: hvdlab COMMAND

  run            {USAGE.removeprefix("hvdlab run ")}: run a program on several ranks (`hvdlab run --help`)
  trace          save | summary | top: what ranks did (`hvdlab trace --help`)
  trace check    [--killed] FILE...: check timelines for mistakes
  pools          [stop NAME...]: list the pools that notebooks have left running, or end some
  --version      print the version
"""
WRONG_CALL = 2


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
    """The console script ``hvdlab-horovodrun``: ``hvdlab run`` under a name like horovodrun's."""
    return main(["run", *sys.argv[1:]])


def _dispatch(given: list[str]) -> int:
    match given:
        case ["run", *rest]:
            return run(rest)
        case ["trace", "check", *rest]:
            from hvdlab.collectives.tracing.check import main as check

            return check(rest)
        case ["trace", *rest]:
            from hvdlab.kernel_ext.trace_command import main as trace

            return trace(rest)
        case ["pools", *rest]:
            from hvdlab.kernel_ext.pools_command import main as pools

            return pools(rest)
        case ["--version" | "-v"]:
            print(hvdlab.__version__)
            return 0
        case ["--help" | "-h"]:
            print(HELP, end="")
            return 0
        case _:
            print(HELP, end="", file=sys.stderr)
            return WRONG_CALL


def run(arguments: Sequence[str]) -> int:
    """``hvdlab run``: the exit code is that of the rank that failed first, or 0."""
    given, command = parse(arguments)
    if given.get("version"):
        print(hvdlab.__version__)
        return 0
    if given.get("check_build"):
        from hvdlab.runner.build import report

        print(report())
        return 0
    config = read_config(Path(given["config_file"])) if "config_file" in given else {}
    wishes = Wishes(given, config, os.environ)
    if not command:
        raise InvalidRequestError(f"there is no program to run; usage: {USAGE}")
    out, err = Writer(sys.stdout), Writer(sys.stderr)
    say = speaker(err)
    for warning in wishes.warnings():
        say(warning)
    job = wishes.job(command, stdin=_reads_stdin())
    if job.launcher == MPI:
        parse_options(MPI, (), job.launcher_options)  # mpiexec has --mpi-args
        from hvdlab.runner.mpi import replace_process

        replace_process(job, wishes)
    from hvdlab.runner.job import JobRun

    directory = wishes.get("output_filename")
    sink: Sink
    if directory:
        sink = FileSink(Path(directory), job.size)
    else:
        sink = ConsoleSink(out, err, timestamp=bool(wishes.get("prefix_output_with_timestamp")))
    return JobRun(job, sink, say, verbose=bool(wishes.get("verbose"))).run().code


def speaker(err: Writer) -> Callable[[str], None]:
    """A function that writes the launcher's own lines, with ``hvdlab:`` in front."""

    def say(text: str) -> None:
        err.line(f"hvdlab: {visible_coloured(text)}".encode(), False)
        err.flush()

    return say


def _reads_stdin() -> bool:
    """Whether rank 0 reads our standard input: only if it is no terminal, as ranks are not in a terminal's foreground."""
    try:
        return not os.isatty(0)
    except OSError:
        return False


def _close_output() -> None:
    """A reader that is gone (``| head``) is no error worth a traceback at exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
