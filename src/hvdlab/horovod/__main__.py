"""``python -m hvdlab.horovod script.py [arguments]``: run a script in which ``import horovod`` means hvdlab.

``-m module`` in place of the script runs a module. An installed Horovod is hidden. Processes that the script starts
are treated alike.
"""

from __future__ import annotations

import os
import runpy
import sys

from hvdlab.horovod.import_hook import install_as_horovod


def main(arguments: list[str]) -> None:
    """Run the program of the arguments, in this process."""
    by_name = arguments[:1] == ["-m"]
    given = arguments[by_name:]
    if not given or given[0] in ("-h", "--help"):
        sys.exit(__doc__)
    install_as_horovod(force=True)
    sys.argv[:] = given
    if by_name:
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(given[0]))
        runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
