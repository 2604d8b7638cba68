"""Which tests run in one worker of pytest-xdist, and in which order the workers get them.

Tests that share an expensive resource (ranks, a kernel, a network of hosts, a JupyterLab) form a *group*, which one
worker runs from its beginning to its end. A group is a module, unless the shared resource spans modules or a module is
too long for one worker.

The groups are read off the tests' names, the only thing that the process which distributes them knows. (xdist's own
``loadgroup`` writes its groups into the names, which pytest 9.2 does not let it.)
"""

from __future__ import annotations

import re

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONGEST_FIRST = (
    "browser",
    "multihost",
    "kernel_ext/pool",
    "magics/test_debugger",
    "examples",
    "chaos",
    "magics",
    "kernel_ext/spmd",
    "kernel_ext/rank",
    "runner",
    "conformance",
    "torch",
    "tensorflow",
    "collectives/engine",
)
"""Beginnings of module names. Groups that take minutes begin early, so that no worker is left alone with one at the end."""

TOGETHER = ("browser", "tensorflow")
"""Folders that are a group each: several browsers at once would leave nothing of two cores for what they look at, and TensorFlow
costs seconds of CPU for each process that imports it."""

RESIDENT = {
    "conformance": re.compile(r"\[([a-z-]+-\d+)"),
    "torch": re.compile(r"\[(\d+)"),
}
"""By folder, the part of a test's name that says which resident processes it shares with tests of other modules."""


def module_of(name: str) -> str:
    """Return the module of a test within ``tests``, as in ``kernel_ext/pool/test_keep``."""
    return name.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def group_of(name: str) -> str:
    """Return the group to which the test of this name belongs."""
    module = module_of(name)
    folder = module.rpartition("/")[0]
    if folder in TOGETHER:
        return folder
    shared = RESIDENT[folder].search(name) if folder in RESIDENT else None
    return f"{folder} {shared[1]}" if shared else module


def priority_of(name: str) -> int:
    """The smaller, the earlier."""
    module = module_of(name)
    return next((i for i, start in enumerate(LONGEST_FIRST) if module.startswith(start)), len(LONGEST_FIRST))


class GroupScheduling(LoadScopeScheduling):
    """Scheduling that gives workers whole groups, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # by the number of tests, not by their length
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
