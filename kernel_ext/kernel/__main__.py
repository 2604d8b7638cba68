"""``python -m hvdlab.kernel_ext.kernel -f CONNECTION_FILE``: the kernel, as a frontend starts it."""

from __future__ import annotations

import os
import sys


def main() -> None:
    # A file beside the notebook must not be imported in place of a module of ours; the shell puts the directory back.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    from ipykernel.kernelapp import IPKernelApp

    from hvdlab.kernel_ext.kernel.kernel import HvdlabKernel

    IPKernelApp.launch_instance(kernel_class=HvdlabKernel)


if __name__ == "__main__":
    main()
