"""Command lines and environment of ranks that are started as programs.

Of a command line of Python's: the interpreter's part of it, and running the rest in an interpreter that runs already.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import re
import runpy
import signal
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Literal, Self

from hvdlab.collectives.rendezvous.launchers import LAUNCHERS

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*")
_WITH_VALUE = "WX"
"""Options of the interpreter, of one letter, that are followed by a value."""


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command line such as ``python -u train.py --epochs 3``, in its parts.

    Attributes:
        interpreter: The program, ``python``.
        options: The interpreter's own options, ``("-u",)``.
        kind: Kind of the program: a script, a module (``-m``), or code (``-c``).
        what: The path, the module's name, or the code.
        arguments: The program's arguments, ``("--epochs", "3")``.
    """

    interpreter: str
    options: tuple[str, ...]
    kind: Literal["script", "module", "code"]
    what: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> Self | None:
        """Parse a command line; ``None`` if it does not start a Python program that is named in it."""
        if not command or not _INTERPRETER.fullmatch(os.path.basename(command[0])):
            return None
        interpreter, rest, options = command[0], list(command[1:]), []
        while rest:
            word = rest.pop(0)
            if word == "--check-hash-based-pycs" and rest:
                options += [word, rest.pop(0)]
            elif not word.startswith("-"):
                return cls(interpreter, tuple(options), "script", word, tuple(rest))
            elif word == "-" or word.startswith("--"):
                return None
            else:
                letters = re.match(rf"-[^mc{_WITH_VALUE}]*", word)
                assert letters is not None  # the pattern matches the dash
                before, after = letters.group(), word[letters.end() :]
                if after and after[0] in _WITH_VALUE:
                    options.append(word)
                    if len(after) == 1 and rest:
                        options.append(rest.pop(0))
                    continue
                if before != "-":
                    options.append(before)
                if after:
                    what = after[1:] or (rest.pop(0) if rest else "")
                    kind: Literal["module", "code"] = "module" if after[0] == "m" else "code"
                    return cls(interpreter, tuple(options), kind, what, tuple(rest)) if what else None
        return None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the whole command line."""
        what = {"script": (), "module": ("-m",), "code": ("-c",)}[self.kind]
        return (self.interpreter, *self.options, *what, self.what, *self.arguments)

    def run(self) -> None:
        """Run the program in this process, as ``__main__``, and return when its main module has ended.

        The rest of the program's end is the caller's: it returns from its own main function. An exception that the program
        does not catch is shown as the interpreter shows it.

        Raises:
            SystemExit: The program asks to end, or has ended by an exception.
        """
        sys.orig_argv[:] = self.words
        sys.argv[:] = [self.what if self.kind == "script" else f"-{self.kind[0]}", *self.arguments]
        try:
            match self.kind:
                case "module":
                    _set_first_path(os.getcwd())
                    runpy.run_module(self.what, run_name="__main__", alter_sys=True)
                case "code":
                    _set_first_path("")
                    # Words of the command line need not be UTF-8: os.fsdecode() has kept other bytes as
                    # surrogates.
                    _run_as_main(self.what.encode("utf-8", "surrogateescape"), "")
                case "script":
                    self._run_script()
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (shown, and the process ends)
            _show(error)

    def _run_script(self) -> None:
        """Run a script, a directory or an archive with a ``__main__``."""
        path, package = os.path.abspath(self.what), None
        if os.path.isdir(path):
            package = ""
            _set_first_path(path)
            path = os.path.join(path, "__main__.py")
        elif zipfile.is_zipfile(path):
            if not sys.flags.safe_path:
                del sys.path[0]  # the archive takes that place
            runpy.run_path(self.what, run_name="__main__")
            return
        else:
            _set_first_path(os.path.dirname(os.path.realpath(path)))
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            text = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
            print(f"{self.interpreter}: {text}", file=sys.stderr)
            raise SystemExit(2) from None
        _run_as_main(source, path, package)


def _set_first_path(place: str) -> None:
    """Return where Python searches for modules first: beside the program, unless an option of the interpreter forbids it."""
    if not sys.flags.safe_path:
        sys.path[0] = place


def _run_as_main(source: bytes, path: str, package: str | None = None) -> None:
    """Execute a module's source as a ``__main__`` that stays, since threads and exit handlers may outlive its last line.

    Args:
        path: The file that has it, or empty.
        package: The module's ``__package__``.
    """
    main = ModuleType("__main__")
    main.__dict__["__builtins__"], main.__package__ = builtins, package
    if path:
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    # Without dont_inherit, the `from __future__ import annotations` of this module would apply to the
    # program.
    code = compile(source, path or "<string>", "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102  # the user's own program


def _show(error: BaseException) -> None:
    """Show an exception that the program did not catch, without our own frames, and end as the interpreter then does.

    Raises:
        SystemExit: Always.
    """
    own = __name__
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == own:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.excepthook(type(error), error, traceback)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.flush()
        # The interpreter ends by the signal as well, so that the parent sees an interrupt and not an exit
        # code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


FOREIGN = tuple(
    sorted(
        {name for launcher in LAUNCHERS for name in (*launcher.rank, *launcher.local_rank)}
        | {"PMI_FD", "PMI_ID", "PMI_PORT", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE"}
    )
)
"""Variables by which another launcher described this process; our ranks must not take them for theirs."""

_AT_HOME = frozenset(
    (
        "_",
        "DISPLAY",
        "HOME",
        "HOSTNAME",
        "LOGNAME",
        "LS_COLORS",
        "OLDPWD",
        "PWD",
        "SHELL",
        "SHLVL",
        "TERM",
        "TMPDIR",
        "USER",
    )
)
_AT_HOME_PREFIXES = ("BASH_FUNC", "SSH_", "XDG_")


EXCLUDED = "HVDLAB_ENV_EXCLUDE"
"""Names the variables that ranks on other hosts do not get, by patterns between commas."""


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other hosts and in engines get.

    Args:
        environ: The variables of this process. Those that belong to this host or its terminal stay here, and so do those that
            :data:`EXCLUDED` names.
    """
    at_home = excluded_by_user(environ)
    return {
        name: value
        for name, value in environ.items()
        if name not in _AT_HOME and not name.startswith(_AT_HOME_PREFIXES) and name not in at_home
    }


def excluded_by_user(environ: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in ``environ`` that the patterns in :data:`EXCLUDED` keep on this host."""
    patterns = [pattern for part in environ.get(EXCLUDED, "").split(",") if (pattern := part.strip())]
    return {name for name in environ if any(fnmatchcase(name, pattern) for pattern in patterns)}


def default_python() -> str:
    """Return the interpreter of ranks and agents."""
    return sys.executable or str(Path("python3"))
