"""``horovod.runner``: starting ranks from Python."""

from __future__ import annotations

from hvdlab.runner import run

__all__ = ["run"]
