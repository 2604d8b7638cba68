"""Errors of collectives that autograd's C++ engine waits for, as in DDP's backward pass: ``backward()`` raises them as they are."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch

from hvdlab.collectives.uncaught import own_error
from hvdlab.torch.compiling import untraced_frame


def keep_errors() -> None:
    """Let ``backward()`` and ``torch.autograd.grad`` raise hvdlab's own errors, from now on in this process.

    C++ keeps nothing of an error but its text. The one function of torch's through which all Python code runs the engine is replaced by one that
    puts the error back. Where torch has no such function (before 2.3), only what ends a cell or a program is put back.
    """
    graph: Any = torch.autograd.graph
    original = getattr(graph, "_engine_run_backward", None)
    if not isinstance(original, FunctionType) or original.__globals__ is globals():
        return
    # Callers look it up in either module.
    graph._engine_run_backward = torch.autograd._engine_run_backward = _with_own_errors(original)  # type: ignore[attr-defined]


def _with_own_errors(original: Any) -> Any:
    @functools.wraps(original)
    @untraced_frame
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            own = own_error(error)
            if own is error:
                raise
        # Not within the handler: the error that it replaces would be shown as what it came from.
        raise own.with_traceback(None)

    return run_backward
