"""``horovod.runner.launch``: the command line of horovodrun, which is that of ``hvdlab run``."""

from __future__ import annotations

import argparse
import sys


def run_commandline() -> int:
    """Run the command in ``sys.argv``, as ``hvdlab run`` does. Returns the exit code, for ``sys.exit``."""
    from hvdlab.runner.cli import horovodrun

    return horovodrun()


def parse_args() -> argparse.Namespace:
    """Return ``sys.argv`` as the values of the flags; ``None`` for a flag that was not given.

    Raises:
        SystemExit: The arguments can't be read (2), or the user asked for help (0).
    """
    from hvdlab.runner.cli import parser

    return parser().parse_args()


def check_build(verbose: object) -> None:
    """Print the abilities of this installation, and those that it lacks, with reasons: ``hvdlab run --check-build``."""
    from hvdlab.runner.cli import build_report

    print(build_report())


def is_gloo_used(
    use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None
) -> bool:
    """Return whether the launcher itself starts the ranks, which Horovod calls Gloo, rather than mpiexec or jsrun."""
    return bool(use_gloo) or not (use_mpi or use_jsrun)


if __name__ == "__main__":
    sys.exit(run_commandline())
