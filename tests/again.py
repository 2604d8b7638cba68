"""Runs what failed in the last run of pytest once more, and says at the end which tests needed that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

LAST_FAILED = Path(__file__).resolve().parents[1] / ".pytest_cache" / "v" / "cache" / "lastfailed"
"""Where pytest keeps the names of what failed."""


def failed() -> list[str]:
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []


def summary(first: list[str], second: list[str]) -> str:
    """What failed at first, and whether it passed then."""
    lines = [f"{len(first)} of the tests failed in the first run:"]
    lines += [f"  {'failed again' if name in second else 'passed then '}  {name}" for name in first]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    first = failed()
    code = int(pytest.main([*arguments, "--last-failed", "--last-failed-no-failures", "none"]))
    # What could not even be collected has no second verdict: then nothing counts as passed.
    print(summary(first, failed() if code <= pytest.ExitCode.TESTS_FAILED else first))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
