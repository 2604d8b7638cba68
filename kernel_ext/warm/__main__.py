"""``python -m hvdlab.kernel_ext.warm CONTROL POOL LIFELINE``: the warm process.

``CONTROL`` is the number of an inherited socket to the pool, ``POOL`` the process id of the pool's process,
``LIFELINE`` the number of the writing end of the pipe that children depend on. Standard input is a pipe that ends when
the pool's process does.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys


def main() -> None:
    control, pool, lifeline = (int(word) for word in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from hvdlab.collectives.linux import adopt_orphans, name_process

    name_process("hvd-warm", "hvdlab: warm process")
    adopt_orphans()
    os.set_inheritable(control, False)
    os.set_inheritable(lifeline, False)
    if os.getppid() != pool:
        os._exit(1)
    gc.disable()  # what is imported stays; collecting during imports only costs time
    from hvdlab.kernel_ext.warm.link import PoolLink
    from hvdlab.kernel_ext.warm.preload import LATER, load, modules_to_load
    from hvdlab.kernel_ext.warm.process import PULSE, WarmShell

    environment = dict(os.environ)
    # A thread that runs at a fork is lost in the child, with the locks that it held.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # A few descriptors for each rank add up to more than a process usually may have; ranks get the old limit back.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shell = WarmShell(PoolLink(socket.socket(fileno=control), pool, PULSE), lifeline, LATER)
    role = shell.run(lambda: load(modules_to_load(environment)))
    if role is None:
        os._exit(0)  # taking down a framework's modules one by one would take as long as a cell
    from hvdlab.kernel_ext.warm.child import become

    become(role, open_files=soft)


if __name__ == "__main__":
    main()
