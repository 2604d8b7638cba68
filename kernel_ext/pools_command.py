"""``hvdlab pools``: lists the kept pools, and ends them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext import keeping
from hvdlab.kernel_ext.registry import Registry, table


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit code.

    Raises:
        InvalidRequestError: The command can't be read, or there is no such pool, or a process uses it.
    """
    match list(arguments):
        case []:
            print(table(Registry().all()))
        case ["stop", *names] if names:
            for name in names:
                keeping.stop(name)
                print(f"the pool `{name}` has ended, with its ranks and their variables")
        case _:
            raise InvalidRequestError("write `hvdlab pools`, or `hvdlab pools stop NAME ...`")
    return 0
