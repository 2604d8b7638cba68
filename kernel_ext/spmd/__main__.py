"""``python -m hvdlab.kernel_ext.spmd -f CONNECTION_FILE``: the kernel, as a frontend starts it."""

from __future__ import annotations

import sys

from ipykernel.kernelapp import IPKernelApp

from hvdlab.kernel_ext.spmd.kernel import HvdlabKernel


def main() -> None:
    if (
        sys.path and sys.path[0] == ""
    ):  # as `python -m ipykernel_launcher`: modules beside the notebook come later
        del sys.path[0]
    IPKernelApp.launch_instance(kernel_class=HvdlabKernel)


if __name__ == "__main__":
    main()
