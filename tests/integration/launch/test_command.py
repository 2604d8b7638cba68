"""Command lines of Python's, taken apart as the interpreter takes them apart."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.launch.command import PythonCommand


@pytest.mark.parametrize(
    ("line", "options", "kind", "what", "arguments"),
    [
        ("python train.py", (), "script", "train.py", ()),
        ("/usr/bin/python3.11 -u train.py -m x", ("-u",), "script", "train.py", ("-m", "x")),
        ("python -um pkg.mod --lr 1", ("-u",), "module", "pkg.mod", ("--lr", "1")),
        ("python -mpkg", (), "module", "pkg", ()),
        ("python3 -W error -Xdev -c 1+1 a", ("-W", "error", "-Xdev"), "code", "1+1", ("a",)),
        ("python -OOc pass", ("-OO",), "code", "pass", ()),
        ("python -uWerror train.py", ("-uWerror",), "script", "train.py", ()),
        (
            "python --check-hash-based-pycs never t.py",
            ("--check-hash-based-pycs", "never"),
            "script",
            "t.py",
            (),
        ),
    ],
)
def test_python_programs(
    line: str, options: tuple[str, ...], kind: str, what: str, arguments: tuple[str, ...]
) -> None:
    found = PythonCommand.parse(line.split())
    assert found is not None
    assert (found.options, found.kind, found.what, found.arguments) == (options, kind, what, arguments)


@pytest.mark.parametrize(
    "line",
    ["", "bash train.sh", "./train.py", "python", "python -", "python -u", "python -m", "python --version", "pythonic x.py"],
)  # fmt: skip
def test_what_is_no_python_program_that_is_named(line: str) -> None:
    assert PythonCommand.parse(line.split()) is None


_OPTIONS = st.lists(
    st.sampled_from([["-u"], ["-O"], ["-W", "ignore"], ["-Wignore"], ["-X", "utf8"], ["-Bs"]]), max_size=3
)
_PROGRAM = st.sampled_from([["script.py"], ["-m", "runpy"], ["-mrunpy"], ["-c", "pass"], ["-uc", "pass"]])


@given(_OPTIONS, _PROGRAM, st.lists(st.sampled_from(["-m", "-c", "x", "--lr", "-u"]), max_size=3))
def test_the_words_of_a_taken_apart_command_mean_the_same(
    options: list[list[str]], program: list[str], arguments: list[str]
) -> None:
    found = PythonCommand.parse(
        ["python", *(word for option in options for word in option), *program, *arguments]
    )
    assert found is not None
    assert found.arguments == tuple(arguments)
    assert PythonCommand.parse(found.words) == found


def test_arguments_as_the_interpreter_sees_them() -> None:
    line = [
        sys.executable,
        "-uW",
        "ignore",
        "-c",
        "import sys; print(sys.argv, sys.flags.utf8_mode)",
        "-X",
        "b",
    ]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    found = PythonCommand.parse(line)
    assert found is not None
    assert said.startswith(repr(["-c", *found.arguments]))
