"""Which tests run in one worker of pytest-xdist, and in which order the workers get them.

Tests that share an expensive resource (ranks, a kernel, a network of hosts, a JupyterLab) form a *group*, which one
worker runs from its beginning to its end. A group is a module, unless the shared resource spans modules or a module is
too long for one worker.

The groups are read off the tests' names, the only thing that the process which distributes them knows. (xdist's own
``loadgroup`` writes its groups into the names, which pytest 9.2 does not let it.)
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("system/browser", "integration/tensorflow")
"""Folders that are a group each: several browsers at once would leave nothing of two cores for what they look at, and TensorFlow
costs seconds of CPU for each process that imports it."""

SYSTEM = re.compile(r"(chaos|system)/(?!repository/)")
"""Folders whose tests drive whole notebooks, browsers, networks of hosts and campaigns of faults: they are marked ``system``."""

RESIDENT = {
    "conformance/planes": re.compile(r"\[([a-z-]+-\d+)"),
    "integration/torch": re.compile(r"\[(\d+)"),
}
"""By folder, the part of a test's name that says which resident processes it shares with tests of other modules."""

LAST_RUN = "out/timings.json"
"""Seconds by test, of the last runs in this tree. A path within the tree."""

COMMITTED = "tests/data/group_seconds.json"
"""Seconds by group, for a tree in which nothing has run yet. ``make timings`` writes it from `LAST_RUN`."""

UNKNOWN = 60.0
"""Seconds that a group counts which has not run yet: before the short ones, and after those that take minutes."""

WORTH_A_LINE = 1.0
"""Seconds below which a group is not committed: the order of short groups changes nothing."""


def module_of(name: str) -> str:
    """Return the module of a test within ``tests``, as in ``integration/kernel_ext/pool/test_keep``."""
    return name.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def group_of(name: str) -> str:
    """Return the group to which the test of this name belongs."""
    module = module_of(name)
    folder = module.rpartition("/")[0]
    if folder in TOGETHER:
        return folder
    shared = RESIDENT[folder].search(name) if folder in RESIDENT else None
    return f"{folder} {shared[1]}" if shared else module


def is_system_test(name: str) -> bool:
    """Return whether the test of this name is one of `SYSTEM`, which ``make test-system`` runs."""
    return SYSTEM.match(module_of(name)) is not None


class Timings:
    """Seconds that tests took when they ran last, which decide which groups begin first.

    A group that takes minutes must not begin when the other workers are about to end. A group that has no time yet counts as
    one of a minute.
    """

    def __init__(self, groups: Mapping[str, float], tests: Mapping[str, float] | None = None) -> None:
        """Create timings.

        Args:
            groups: Seconds by group.
            tests: Seconds by the name of the test, from runs since those of ``groups``.
        """
        self.groups = dict(groups)
        for group, seconds in group_seconds(tests or {}).items():
            # The tests may be only a part of the group: those that were asked for by name.
            self.groups[group] = max(seconds, self.groups.get(group, 0.0))
        self.ran: dict[str, float] = {}

    @classmethod
    def read(cls, root: Path) -> Timings:
        """Return the timings of the tree at ``root``: those of its own last run, and those that are committed."""
        return cls(_seconds(root / COMMITTED), _seconds(root / LAST_RUN))

    def order(self, group: str) -> tuple[float, str]:
        """Return the key by which groups are sorted: the longest first, and each in one piece."""
        return -self.groups.get(group, UNKNOWN), group

    def count(self, report: pytest.TestReport) -> None:
        """Add the duration of a test's setup, call or teardown."""
        self.ran[report.nodeid] = self.ran.get(report.nodeid, 0.0) + report.duration

    def write(self, root: Path) -> None:
        """Keep the timings for the next run. A test that did not run keeps its time while its module exists."""
        tests = {
            name: seconds
            # Read again, since another run may have ended meanwhile.
            for name, seconds in {**_seconds(root / LAST_RUN), **self.ran}.items()
            if (root / name.partition("::")[0]).is_file()
        }
        path = root / LAST_RUN
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")  # another run may read, or write its own, at this moment
        part.write_text(json.dumps({name: round(tests[name], 3) for name in sorted(tests)}, indent=0))
        part.replace(path)

    def slowest(self, count: int) -> list[tuple[str, float]]:
        """Return the groups of this run that took the longest, the longest first."""
        groups = group_seconds(self.ran)
        return sorted(groups.items(), key=lambda one: (-one[1], one[0]))[:count]


def group_seconds(tests: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each group, from those of its tests."""
    groups: defaultdict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        groups[group_of(name)] += seconds
    return dict(groups)


def _seconds(path: Path) -> dict[str, float]:
    try:
        read: dict[str, float] = json.loads(path.read_text())
    except FileNotFoundError:  # no run yet
        return {}
    return read


def report_lines(slowest: Iterable[tuple[str, float]]) -> list[str]:
    """Return the lines that end a run: a group's seconds, and its name."""
    return [f"{seconds:7.1f}s {group}" for group, seconds in slowest]


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Scheduling that gives workers whole groups, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # by the number of tests, not by their length
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def commit_timings(root: Path) -> int:
    """Write `COMMITTED` from `LAST_RUN`, and return the number of groups in it.

    Raises:
        SystemExit: There was no run in this tree.
    """
    tests = _seconds(root / LAST_RUN)
    if not tests:
        raise SystemExit(f"{LAST_RUN} is not there: run `make unit` first")
    groups = {group: seconds for group, seconds in group_seconds(tests).items() if seconds >= WORTH_A_LINE}
    lines = {group: round(groups[group]) for group in sorted(groups)}
    (root / COMMITTED).write_text(json.dumps(lines, indent=0) + "\n")
    return len(lines)


if __name__ == "__main__":
    print(f"{commit_timings(Path(__file__).parents[2])} groups in {COMMITTED}")
