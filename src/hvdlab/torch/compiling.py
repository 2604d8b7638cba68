"""Collectives inside of what ``torch.compile`` compiles: they run as they are, between two compiled graphs.

torch's tracer follows Python calls. It must not follow these into the engine, whose locks and sockets can't be traced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of a function.

    As long as nobody compiles anything torch's compiler is not imported, which takes a second.
    """
    # torch.compiler.disable would import it here; this is what torch itself uses to put that off.
    guarded = _disable_dynamo(function)

    @functools.wraps(function)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return guarded(*args, **kwargs)

    return outer
