"""hvdlab: interactive distributed training in a notebook.

The package root stays light on purpose: the coordinator process imports it and must be up in a fraction of a
second, so nothing here may import numpy, torch or IPython at import time.
"""

from __future__ import annotations

__version__ = "0.1.0"
