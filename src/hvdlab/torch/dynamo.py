"""Collectives inside of functions that ``torch.compile`` compiles: they run uncompiled, between two compiled graphs.

torch's tracer follows Python calls. It must not follow a collective into the engine, whose locks and sockets can't be traced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of a function.

    torch's compiler, whose import takes a second, is not imported before the program itself compiles something.
    """
    # torch.compiler.disable would import the compiler here; torch itself uses this function to put the import off.
    guarded = _disable_dynamo(function)

    @functools.wraps(function)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        # Before that module is imported, torch compiles nothing that could trace this call.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return guarded(*args, **kwargs)

    return outer


def untraced_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of a function's own code. Functions that it calls are compiled as without it.

    For code between two functions of torch's. Before torch 2.7 it has no effect.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return function
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, skip)
    return function


def untraced_methods(cls: C) -> C:
    """Keep ``torch.compile`` out of the methods of a class, and out of functions that they call.

    For methods that C++ calls while compiled code runs, as DDP's reducer calls those of the process group: the tracer would take
    such a call for the beginning of the user's code. The methods themselves are not wrapped. Has no effect before torch 2.7.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return cls
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for member in vars(cls).values():
        function: Any = getattr(member, "fget", getattr(member, "__func__", member))
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, skip)
    return cls
