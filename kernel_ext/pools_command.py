"""``hvdlab pools``: lists the kept pools, and ends them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.kept_pools import kept_elsewhere, stop
from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry, table


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit code.

    Raises:
        InvalidRequestError: The command can't be read, or there is no such pool, or a process uses it.
    """
    match list(arguments):
        case []:
            elsewhere, problems = kept_elsewhere()
            print("\n".join([table(KeptPoolRegistry().all(), elsewhere), *problems]))
        case ["stop", *names] if names:
            for name in names:
                stop(name)
                print(f"the pool `{name}` has ended, with its ranks and their variables")
        case _:
            raise InvalidRequestError("write `hvdlab pools`, or `hvdlab pools stop NAME ...`")
    return 0
