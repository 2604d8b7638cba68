"""The warm process: it imports what ranks need once, forks them, and learns at once when one ends.

:func:`hvdlab.kernel_ext.warm.prewarm` starts it in the background (at ``%load_ext``). This package stays light: the
warm process itself imports it, and must be able to answer before anything heavy was imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdlab.kernel_ext.warm.ahead import WarmPool


def prewarm() -> WarmPool:
    """Begin to start what a pool needs and return at once; hand the result to ``Pool.start(warm=...)``.

    Nothing is raised here: what goes wrong in the background is raised by ``Pool.start``. ``close()`` it if no pool
    takes it.
    """
    from hvdlab.kernel_ext.warm.ahead import WarmPool

    return WarmPool.begin()
