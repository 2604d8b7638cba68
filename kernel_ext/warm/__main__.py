"""``python -m hvdlab.kernel_ext.warm CONTROL POOL``: the warm process.

``CONTROL`` is the number of an inherited socket to the pool, ``POOL`` the process id of the pool's process.
Standard input is a pipe that ends when the pool's process does.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys


def main() -> None:
    control, pool = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from hvdlab.collectives.linux import adopt_orphans, name_process, raise_on_hangup

    name_process("hvd-warm", "hvdlab: warm process")
    adopt_orphans()
    os.set_inheritable(control, False)
    # An import can take many seconds, in which nothing is read: until then the pool's end ends this process at once.
    raise_on_hangup(0, True)
    if os.getppid() != pool:
        os._exit(1)
    gc.disable()  # what is imported stays; collecting during imports only costs time
    from hvdlab.kernel_ext.warm.preload import LATER, load, modules_to_load

    environment = dict(os.environ)
    # A thread that runs at a fork is lost in the child, with the locks that it held.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    loaded = load(modules_to_load(environment))
    from hvdlab.kernel_ext.warm.process import WarmShell

    # A few descriptors for each rank add up to more than a process usually may have; ranks get the old limit back.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shell = WarmShell(socket.socket(fileno=control), 0, pool, LATER)
    raise_on_hangup(0, False)
    role = shell.run(loaded)
    if role is None:
        os._exit(0)  # taking down torch's modules one by one would take as long as a cell
    from hvdlab.kernel_ext.warm.child import become

    become(role, open_files=soft)


if __name__ == "__main__":
    main()
