"""Starts what the first pool needs while the user is still typing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hvdlab.collectives.errors import HvdlabError

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.prestart import Prestart


class Ahead:
    """A warm pool in the making, on a thread of its own, so that ``%load_ext`` returns at once."""

    def __init__(self) -> None:
        self._warm: Prestart | None = None
        self._thread = threading.Thread(target=self._begin, name="hvdlab-ahead", daemon=True)
        self._thread.start()

    def take(self) -> Prestart | None:
        """Hand the warm pool over, once; None if it could not be begun (``Pool.start`` then finds out why)."""
        self._thread.join()
        warm, self._warm = self._warm, None
        return warm

    def close(self) -> None:
        """End what was started, unless it was taken."""
        warm = self.take()
        if warm is not None:
            warm.close()

    def _begin(self) -> None:
        from hvdlab.kernel_ext.notebook.prestart import Prestart

        try:
            self._warm = Prestart.begin()
        except (HvdlabError, OSError):
            self._warm = None
        import hvdlab.magics.running  # noqa: F401  # the first cell needs it
