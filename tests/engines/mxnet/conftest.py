"""Tests beside real MXNet, in the environment that ``make mxnet`` makes; elsewhere they are not collected.

The folder is not called ``mxnet``: it would be found under that name where MXNet is not installed.
"""

from __future__ import annotations

import importlib.util
import warnings

collect_ignore_glob = [] if importlib.util.find_spec("mxnet") else ["test_*.py"]

if not collect_ignore_glob:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that numpy and Python are about to drop
        import mxnet  # noqa: F401
