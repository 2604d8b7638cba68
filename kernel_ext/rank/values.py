"""Values between a rank's variables and the pool, pickled."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # no stubs

from hvdlab.kernel_ext.payloads import Done, PullValue, PushValue, Value
from hvdlab.kernel_ext.rank.failures import one_line, safe_str

LONGEST_REPR = 4096


class TooLarge(Exception):
    """The pickle would be larger than allowed."""


class _Bounded(io.BytesIO):
    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self._limit is not None and self.tell() + memoryview(data).nbytes > self._limit:
            raise TooLarge
        return super().write(data)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """cloudpickle that moves torch's tensors to the CPU and drops the unused rest of what a view looks into."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        tensor_type = getattr(torch, "Tensor", None)
        if tensor_type is not None and type(obj) is tensor_type and obj.layout is torch.strided:  # type: ignore[union-attr]  # has a Tensor, so it is the module
            packed = obj.detach().cpu()
            if packed.untyped_storage().nbytes() > packed.numel() * packed.element_size():
                packed = packed.clone()
            if packed is not obj and (packed.data_ptr() != obj.data_ptr() or obj.grad_fn is not None):
                return packed.requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dump(value: Any, limit: int | None = None) -> bytes:
    """Pickle ``value``. Raises :class:`TooLarge` beyond ``limit`` bytes, and what the value's own methods raise."""
    buffer = _Bounded(limit)
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return buffer.getvalue()


def dump_result(value: Any, limit: int) -> tuple[bytes | None, str]:
    """The pickle of a cell's value, or why there is none."""
    try:
        return dump(value, limit), ""
    except TooLarge:
        return None, (
            f"larger than {limit:,} bytes when pickled; give it a name in the cell, `%hvd_pull NAME` brings it"
        )
    except KeyboardInterrupt:
        return None, "interrupted while it was pickled"
    except Exception as error:  # noqa: BLE001  # pickling runs the user's __reduce__
        return None, f"it can't be pickled ({one_line(error)})"


def short_repr(value: Any, plain: str = "") -> str:
    """``plain`` or ``repr(value)``, bounded; never raises."""
    text = plain
    if not text:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001  # a user's __repr__ may raise anything
            text = f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}: {safe_str(error)[:200]}>"
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]}… ({len(text)} characters in all)"


def push(shell: Any, request: PushValue) -> Done:
    """Bind the values to their names; either all of them or none."""
    try:
        # The pool that started this rank sends what its user asked for: no less trusted than the cells themselves.
        values = [pickle.loads(raw) for raw in request.pickles]  # noqa: S301
        shell.push(dict(zip(request.names, values, strict=True)))
    except BaseException as error:  # noqa: BLE001  # unpickling runs the user's code, which may also exit
        return Done(request.ticket, one_line(error))
    return Done(request.ticket)


def pull(shell: Any, request: PullValue) -> Value:
    """Evaluate and pickle each expression; one that fails does not keep the others back."""
    pickles: list[bytes | None] = []
    errors: list[str] = []
    for name in request.names:
        raw, error = _pull_one(shell, name)
        pickles.append(raw)
        errors.append(error)
    return Value(request.ticket, tuple(pickles), _texts(errors))


def _pull_one(shell: Any, name: str) -> tuple[bytes | None, str]:
    try:
        return dump(eval(name, shell.user_global_ns, shell.user_ns)), ""
    except BaseException as error:  # noqa: BLE001  # evaluating and pickling run the user's code, which may also exit
        return None, one_line(error)


def _texts(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(texts)
