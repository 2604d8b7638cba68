"""Arrays as bytes, wherever they are and whichever framework made them.

Nothing here imports a framework: what is not in ``sys.modules`` can't have made the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.array_source import ArraySource
from hvdlab.bindings.framework_hooks import loaded

Bytes = npt.NDArray[np.uint8]


def array_source(value: Any) -> ArraySource | None:
    """``value`` as an array; None if it is no array, or one of Python objects. Raises what the framework raises."""
    for hooks in loaded():
        if (source := hooks.array(value)) is not None:
            return source
    return None
