"""``python -m hvdlab.launch.forkserver CONTROL POOL DEATH_PIPE PROGRAM``: the fork server.

``CONTROL`` is the number of an inherited socket to the pool. ``POOL`` is the process id of the pool's process,
``DEATH_PIPE`` the number of the writing end of the pipe that children depend on. ``PROGRAM`` names the children's program,
as ``module:attribute``. Standard input is a pipe that ends when the pool's process does.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys


def main() -> None:
    control, pool, death_pipe = (int(word) for word in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from hvdlab.collectives.system import adopt_orphans, name_process

    name_process("hvd-forkserver", "hvdlab: fork server")
    adopt_orphans()
    # The pool has passed them on as inheritable. A program that a package starts while it is imported would
    # hold the death pipe, and so keep the ranks alive after the pool.
    os.set_inheritable(control, False)
    os.set_inheritable(death_pipe, False)
    # The pool's process may have died while this interpreter started, before any of its signs was watched.
    if os.getppid() != pool:
        os._exit(1)
    gc.disable()  # imported objects stay, so collecting during imports only costs time
    from hvdlab.launch.forkserver.program import load, load_program, modules_to_load
    from hvdlab.launch.forkserver.server import PULSE, PoolLink, ServerShell

    program = load_program(sys.argv[4])
    environment = dict(os.environ)
    # A thread that runs at a fork is lost in the child, with the locks that it held.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # A few descriptors for each rank add up to more than the usual limit of a process; ranks get the old limit back.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shell = ServerShell(PoolLink(socket.socket(fileno=control), pool, PULSE), death_pipe, program)
    role = shell.run(lambda: load(program, modules_to_load(program, environment)))
    if role is None:
        os._exit(0)  # taking down a framework's modules one by one would take as long as a cell
    from hvdlab.launch.forkserver.children import become

    become(role, program, open_files=soft)


if __name__ == "__main__":
    main()
