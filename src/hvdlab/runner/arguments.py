"""The command line of ``hvdlab run``, made from the table of flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hvdlab.runner.flags import FLAGS, LEVELS, Flag, Kind

USAGE = "hvdlab run -np N [flags] program [arguments]"


def parser() -> argparse.ArgumentParser:
    """A parser whose values are ``None`` for what was not given."""
    found = argparse.ArgumentParser(
        "hvdlab run",
        usage=USAGE,
        description="Run a program on several ranks. Takes horovodrun's flags.",
        allow_abbrev=False,
    )
    groups = {name: found.add_argument_group(name) for name in dict.fromkeys(flag.group for flag in FLAGS)}
    for flag in FLAGS:
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
        case Kind.SWITCH:
            return {"action": "store_const", "const": True}
        case Kind.NUMBER:
            return {"type": int, "metavar": "N"}
        case Kind.REAL:
            return {"type": float, "metavar": "X"}
        case Kind.LEVEL:
            return {"type": str.upper, "choices": LEVELS, "metavar": "LEVEL"}
        case Kind.TWO:
            return {"type": int, "nargs": 2, "metavar": ("LEAST", "MOST")}
        case Kind.TEXTS:
            return {"action": "append", "metavar": "TEXT"}
        case Kind.TEXT:
            return {"metavar": "TEXT"}


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The given flags by dest, and the command.

    Raises:
        SystemExit: The arguments can't be parsed (2), or contain ``--help`` (0).
    """
    given = vars(parser().parse_args(arguments))
    command = given.pop("command")
    if command[:1] == ["--"]:
        del command[0]
    return {dest: value for dest, value in given.items() if value is not None}, command
