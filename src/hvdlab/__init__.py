"""hvdlab: interactive distributed training in a notebook.

The package root stays light on purpose: the coordinator process imports it and must be up in a fraction of a
second, so nothing here may import numpy, torch or IPython at import time. Public names are imported when they are
first used.

Example:
    >>> import hvdlab
    >>> with hvdlab.Pool.start(1) as pool:  # in a notebook: %load_ext hvdlab, and cells with %%hvd_run
    ...     pool.push(factor=3)
    ...     pool.pull("factor * 2")
    {0: 6}
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdlab._version import __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from hvdlab.horovod.import_hook import install_as_horovod as install_as_horovod
    from hvdlab.kernel_ext.notebook.cells.results import CellResults as CellResults
    from hvdlab.kernel_ext.notebook.output.error_report import CellFailed as CellFailed
    from hvdlab.kernel_ext.notebook.pool import Pool as Pool
    from hvdlab.magics.extension import pool as pool
    from hvdlab.runner import run as run
    from hvdlab.widgets.views import export as export
    from hvdlab.widgets.views import membership as membership
    from hvdlab.widgets.views import metrics as metrics
    from hvdlab.widgets.views import ranks as ranks
    from hvdlab.widgets.views import timeline as timeline
    from hvdlab.widgets.views import trace as trace

_LAZY = {
    "Pool": "hvdlab.kernel_ext.notebook.pool",
    "CellResults": "hvdlab.kernel_ext.notebook.cells.results",
    "CellFailed": "hvdlab.kernel_ext.notebook.output.error_report",
    "install_as_horovod": "hvdlab.horovod.import_hook",
    "run": "hvdlab.runner",
    "pool": "hvdlab.magics.extension",
    "export": "hvdlab.widgets.views",
    "timeline": "hvdlab.widgets.views",
    "membership": "hvdlab.widgets.views",
    "metrics": "hvdlab.widgets.views",
    "ranks": "hvdlab.widgets.views",
    "trace": "hvdlab.widgets.views",
}

__all__ = [
    "CellFailed",
    "CellResults",
    "Pool",
    "__version__",
    "export",
    "install_as_horovod",
    "load_ipython_extension",
    "membership",
    "metrics",
    "pool",
    "ranks",
    "run",
    "timeline",
    "trace",
    "unload_ipython_extension",
]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Load the magics: ``%load_ext hvdlab``.

    Args:
        ipython: The shell that gets them.
    """
    from hvdlab.magics.extension import load

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Stop the pool, print that, and remove the magics: ``%unload_ext hvdlab``. ``%reload_ext hvdlab`` keeps everything.

    Args:
        ipython: The shell that had them.
    """
    from hvdlab.magics.extension import unload

    unload(ipython)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hvdlab' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Completion lists it: only names for users, and those of every module.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
