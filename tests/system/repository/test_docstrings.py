"""The docstrings of all public names hold what ``?`` must say, and their examples run on one rank."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from support import docstrings
from support.docstrings import Docstring, lacks, modules

CHECKS = Path(docstrings.__file__)
NEEDS = {"hvdlab.mxnet": "mxnet", "hvdlab.ray": "ray", "hvdlab.spark": "pyspark"}
"""Packages that are in environments of their own, where these examples are run."""


def run_checks(*arguments: str) -> str:
    command = [sys.executable, str(CHECKS), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_docstrings_of_public_names_are_complete() -> None:
    assert run_checks().splitlines() == []


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """The reports of all examples that need no further package; run in one process, since importing takes longest."""
    reports: dict[str, str] = json.loads(run_checks("examples", *(set(modules()) - set(NEEDS))))
    return reports


@pytest.mark.parametrize("module", [name for name in modules() if name not in NEEDS])
def test_the_example_of_a_module_runs(module: str, reports: dict[str, str]) -> None:
    assert not reports[module], reports[module]


@pytest.mark.parametrize("module", list(NEEDS))
def test_the_example_of_a_module_of_another_environment_runs(module: str) -> None:
    if importlib.util.find_spec(NEEDS[module]) is None:
        pytest.skip(f"{NEEDS[module]} is not installed here")
    report = json.loads(run_checks("examples", module))[module]
    assert not report, report


# -- the checks -------------------------------------------------------------------------------------------------------


def complete(path: str, count: int = 3, *, process_set: object = None) -> int:
    """Count the things that are there.

    Args:
        path: A path.
        count: How many; ``3`` by default.
        process_set: The ranks.

    Returns:
        The number.

    Raises:
        ValueError: There is nothing.
        InvalidRequestError: The process set is not registered.
        AbortedError: A rank failed.
    """
    raise ValueError(path, count, process_set)


def incomplete(tensor: object, count: int = 3, *, process_set: object = None) -> int:
    """Do it.

    Args:
        count: How many; ``4`` by default.
        numbers: No such parameter.
    """
    if tensor:
        raise InvalidRequestError("no")
    return count


class Store:
    """Store of values.

    Args:
        size: Number of values.
    """

    def __init__(self, size: int, name: str) -> None:
        self.size, self.name = size, name

    def read(self, key: str) -> str:
        """Return the value of a key."""
        return key

    def write(self, key: str, value: str) -> None:
        """Keep a value."""


def test_a_complete_docstring_lacks_nothing() -> None:
    assert lacks(complete) == []


def test_each_gap_of_a_docstring_is_found() -> None:
    assert lacks(incomplete) == [
        "does not describe tensor",
        "does not describe process_set",
        "describes numbers, which is no parameter",
        "says that count is 4 by default, and it is 3",
        "does not say what it returns (int)",
        "raises InvalidRequestError, and does not say when",
        "does not say when it raises InvalidRequestError",
        "does not say when it raises AbortedError",
        "does not say whether its buffers are valid after a failure",
        "gives no shape or dtype of tensor",
    ]


def test_classes_and_their_methods_are_checked() -> None:
    assert lacks(Store) == ["does not describe name"]
    assert lacks(Store.read, Store) == []
    assert lacks(Store.write, Store) == ["does not describe key"]


def test_entries_of_several_names_and_lines_are_read() -> None:
    text = (
        "Do it.\n\nArgs:\n    a, b: Both,\n        in two lines.\n    *args: More.\n\nReturns:\n    Nothing."
    )
    entries = Docstring(text).entries("Args")
    assert entries == {"a": "Both, in two lines.", "b": "Both, in two lines.", "args": "More."}
