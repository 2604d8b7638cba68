"""Python program, given as text, in a process of :mod:`support.ranks.forked`: ``python -c`` without the imports of frameworks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import IO, Any

from support.patience import PATIENCE
from support.ranks import forked

PROGRAM = "support.ranks.program"


def printed(program: str, given: object, environment: Mapping[str, str], modules: tuple[str, ...]) -> Any:
    """Run a program to its end; return the last line that it prints.

    Args:
        program: Its text.
        given: Object that it reads from its standard input, as JSON.
        environment: Its environment variables.
        modules: Modules that it finds imported, in the order of their imports.

    Returns:
        Object of the last line of its standard output, which is JSON.

    Raises:
        AssertionError: Its exit code was not 0.
        subprocess.TimeoutExpired: It had not ended within `PATIENCE`.
    """
    with TemporaryFile("w+") as stdin, TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        json.dump(given, stdin)
        stdin.seek(0)
        streams = [file.fileno() for file in (stdin, stdout, stderr)]
        process = forked.fork(PROGRAM, [program], environment, fds=streams, modules=modules)
        try:
            code = process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        assert code == 0, _content(stderr)
        return json.loads(_content(stdout).splitlines()[-1])


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def main() -> None:
    """Run the program of the last argument, in the new process; the others are its standard streams."""
    *streams, program = sys.argv[1:]
    for number, fd in enumerate(map(int, streams)):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["-c"]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # a program of a test
