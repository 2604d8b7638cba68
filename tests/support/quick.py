"""Tests of the modules that changed, as `make quick` runs them: those whose folder mirrors the module's, in bounded time.

A change is what differs from the branch ``main``, or on ``main`` itself what is not committed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the other modules of tests are, for this program


from support.scheduling import Timings, group_of

ROOT = Path(__file__).parents[2]
BUDGET = 60.0
"""Seconds of tests, by their last run, on two workers: half of the two minutes that all of `make quick` has."""
UNKNOWN = 3.0
"""Seconds that a group of tests counts which has not run yet."""
BASES = ("tests/unit", "tests")
"""Folders below which tests mirror the packages. Only the first that is there counts."""


@dataclass(frozen=True)
class Selection:
    """Test modules of a change.

    Attributes:
        run: Those that fit into the budget.
        left_out: Those that do not.
    """

    run: tuple[str, ...]
    left_out: tuple[str, ...]


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def changed_files() -> list[str]:
    """Return the paths that differ from ``main``, and those that git does not know yet."""
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/main")
    base = git("merge-base", "HEAD", "main") if branches else ["HEAD"]
    paths = {*git("diff", "--name-only", *base), *git("ls-files", "--others", "--exclude-standard")}
    return sorted(path for path in paths if (ROOT / path).is_file())


def mirrored(path: str, modules: Sequence[str], base: str) -> set[str]:
    """Return the test modules for a module of the product.

    The module ``collectives/engine/hooks.py`` has ``collectives/engine/test_hooks.py`` below the base. Without such a module the
    whole folder counts, or the nearest one above it that has tests.
    """
    place = Path(path.removeprefix("src/hvdlab/"))
    folder = f"{base}/{place.parent}"
    own = [name for name in modules if name.startswith(f"{folder}/test_{place.stem}")]
    while not own and folder != base:
        own = [name for name in modules if name.startswith(f"{folder}/")]
        folder = str(Path(folder).parent)
    return set(own)


def select(changed: Iterable[str], modules: Sequence[str], seconds: Mapping[str, float]) -> Selection:
    """Return the tests of a change: the modules that changed themselves, then the mirrored ones, the shortest first.

    Args:
        changed: Paths within the tree.
        modules: All test modules.
        seconds: Seconds by group of tests, of their last run.
    """
    base = next(one for one in BASES if any(name.startswith(f"{one}/") for name in modules))
    changed = [path for path in changed if path.endswith(".py")]
    own = set(changed) & set(modules)
    found = {
        name for path in changed if not path.startswith("tests/") for name in mirrored(path, modules, base)
    }

    def cost(name: str) -> float:
        return seconds.get(group_of(name), UNKNOWN)

    run: list[str] = []
    left_out: list[str] = []
    room = BUDGET
    for name in [*sorted(own, key=cost), *sorted(found - own, key=lambda name: (cost(name), name))]:
        if cost(name) <= room:
            run.append(name)
            room -= cost(name)
        else:
            left_out.append(name)
    return Selection(tuple(run), tuple(sorted(left_out)))


def main() -> int:
    """Run linter, type checker and tests on the change, and return the exit status of the first that fails."""
    changed = changed_files()
    python = [path for path in changed if path.endswith((".py", ".pyi"))]
    if not python:
        print("quick: no module of Python has changed")
        return 0
    modules = git(
        "ls-files", "--cached", "--others", "--exclude-standard", "tests/**test_*.py", "tests/test_*.py"
    )
    modules = sorted(
        {name for name in modules if Path(name).name.startswith("test_") and (ROOT / name).is_file()}
    )
    selection = select(changed, modules, Timings.read(ROOT).groups)
    commands = [
        ["ruff", "check", *python],
        ["ruff", "format", "--check", *python],
        ["lint-imports"],
        ["mypy"],
    ]
    if selection.run:
        workers = ["-n", "2"] if len(selection.run) > 1 else ["-n", "0"]
        unmarked = "not soak and not alone and not browser and not root"
        commands.append(["pytest", "-q", "-m", unmarked, *workers, *selection.run])
    for command in commands:
        print(f"=== {command[0]}", flush=True)
        status = subprocess.run(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]], cwd=ROOT, check=False
        ).returncode
        no_tests = command[0] == "pytest" and status == 5  # all of them are marked
        if status and not no_tests:
            return status
    if selection.left_out:
        print(f"quick: not run, for want of time: {' '.join(selection.left_out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
