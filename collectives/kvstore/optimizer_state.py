"""Optimizers' states as bytes: MessagePack with raw arrays, never pickle."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.base import Key

_MAGIC = b"hvdlab kvstore states 1\n"
_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})

_Plain = bool | int | float | str | None
_Setting = _Plain | list[tuple[int | str, _Plain]]


class _Array(msgspec.Struct, tag="array", array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Several(msgspec.Struct, tag="several", array_like=True):
    items: list[_Array | _Several | None]


_State = _Array | _Several | None


class ScheduleSpec(msgspec.Struct, array_like=True, frozen=True):
    """Scheduler of the learning rate by the name of its class and its attributes."""

    name: str
    settings: dict[str, int | float | str | list[int]]


class OptimizerSpec(msgspec.Struct, array_like=True, frozen=True):
    """Optimizer by the name of its class and its attributes; dicts among these are lists of pairs.

    ``schedule`` computes its learning rate, if that travels.
    """

    name: str
    settings: dict[str, _Setting]
    schedule: ScheduleSpec | None = None

    def attributes(self) -> dict[str, Any]:
        """Return the attributes, dicts as dicts."""
        return {
            name: dict(value) if isinstance(value, list) else value for name, value in self.settings.items()
        }


class _File(msgspec.Struct, array_like=True):
    states: list[tuple[int | str, _State]]
    optimizer: OptimizerSpec | None


def encode(states: Mapping[Key, Any], optimizer: OptimizerSpec | None) -> bytes:
    """Encode states by key, and an optimizer.

    Raises:
        KVStoreError: A state is neither ``None`` nor an array of numbers nor a tuple or list of such.
    """
    file = _File([(key, _packed(key, state)) for key, state in states.items()], optimizer)
    return _MAGIC + msgspec.msgpack.encode(file)


def decode(data: bytes) -> tuple[dict[Key, Any], OptimizerSpec | None]:
    """Reverse :func:`encode`; lists come back as tuples. Raises ``KVStoreError`` for other bytes."""
    if not data.startswith(_MAGIC):
        raise KVStoreError("these are no states of optimizers as hvdlab writes them")
    try:
        file = msgspec.msgpack.decode(memoryview(data)[len(_MAGIC) :], type=_File)
        states = {key: _unpacked(state) for key, state in file.states}
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise KVStoreError(f"the states of the optimizer are damaged: {error}") from error
    return states, file.optimizer


def write_file(path: str, data: bytes) -> None:
    """Write a file as a whole: at any failure it is the one before or the new one.

    A path that is no regular file, such as a pipe, is written to. A link stays, and the file that it leads to is replaced.

    Args:
        path: Its path.
        data: All that is in it.

    Raises:
        OSError: It can't be written; the previous file is unchanged.
    """
    place = os.path.realpath(path)
    if os.path.exists(place) and not os.path.isfile(place):
        with open(place, "wb") as file:
            file.write(data)
        return
    # In the same directory, since a rename can't go to another file system. Cut, since a name has 255 bytes at most.
    beginning = os.fsencode(os.path.basename(place))[:100].decode(errors="ignore")
    descriptor, draft = tempfile.mkstemp(prefix=f".{beginning}.", dir=os.path.dirname(place))
    try:
        with open(descriptor, "wb") as file:
            # mkstemp() opens the file to its user alone, while others may have been able to read the one before.
            os.fchmod(descriptor, _mode_of(place))
            file.write(data)
            file.flush()
            os.fsync(descriptor)  # otherwise the name might outlive a power failure, and the bytes not
        os.replace(draft, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _mode_of(place: str) -> int:
    """Return the permissions of a file; of one that is not there yet, those that ``open`` would give it."""
    try:
        return stat.S_IMODE(os.stat(place).st_mode)
    except FileNotFoundError:
        # Not by `os.umask`, which shows the mask only by changing it, also for the files of other threads.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        mask = next(int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:"))
        return 0o666 & ~mask


def specify(name: str, attributes: Mapping[str, Any], schedule: ScheduleSpec | None) -> OptimizerSpec:
    """Return an optimizer's name, those of its attributes that are numbers, text, or dicts of such, and its learning rate's schedule.

    Any other attribute is an object of the program, and is left out.
    """
    settings = {attribute: _setting(value) for attribute, value in attributes.items() if _is_setting(value)}
    return OptimizerSpec(name, settings, schedule)


def require_like(attributes: Mapping[str, Any], sample: object, what: str) -> None:
    """Require that attributes make an object like a sample: all that it has, of the same types, and none that hides a method.

    A sample's ``None`` stands for any number or text. An int does for a float.

    Args:
        attributes: The attributes by name.
        sample: A new object of the class.
        what: The owner of the attributes, for the error.

    Raises:
        KVStoreError: They don't.
    """
    klass = type(sample)
    for name, value in vars(sample).items():
        if not (_is_setting(value) or isinstance(value, list)):
            continue  # an object of the program, which does not travel
        if name not in attributes:
            raise KVStoreError(f"{what} lacks {name}")
        if not _is_like(attributes[name], value):
            raise KVStoreError(f"{what} has {name}={attributes[name]!r}, where {value!r} is one of its kind")
    hiding = sorted(name for name in attributes if name not in vars(sample) and hasattr(klass, name))
    if hiding:
        raise KVStoreError(f"{what} has {', '.join(hiding)}, which the class {klass.__name__} has for itself")


def _is_like(value: Any, sample: Any) -> bool:
    if sample is None:
        return _is_plain(value)
    if isinstance(sample, bool | int | float):
        return isinstance(value, bool | int | float)
    return isinstance(value, type(sample))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_setting(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, int | str) and _is_plain(item) for key, item in value.items())
    return _is_plain(value)


def _setting(value: Any) -> _Setting:
    if isinstance(value, dict):
        return list(value.items())
    found: _Setting = value
    return found


def _packed(key: Key, state: Any) -> _State:
    if state is None:
        return None
    if isinstance(state, tuple | list):
        return _Several([_packed(key, item) for item in state])
    if isinstance(state, np.ndarray) and state.dtype.str[1:] in _TYPES:
        # A file can be loaded on a machine of another byte order.
        little = state.astype(state.dtype.newbyteorder("<"), order="C", copy=False)
        return _Array(state.dtype.str[1:], state.shape, little.tobytes())
    raise KVStoreError(f"the state of key {key!r} is a {type(state).__name__}, which can't be saved", key)


def _unpacked(state: _State) -> Any:
    if state is None:
        return None
    if isinstance(state, _Several):
        return tuple(_unpacked(item) for item in state.items)
    if state.dtype not in _TYPES or min(state.shape, default=0) < 0:
        raise ValueError(f"an array of type {state.dtype!r} and shape {state.shape}")
    dtype = np.dtype("<" + state.dtype)
    # By Python's integers: extents of a damaged file could overflow numpy's, and seem to fit.
    if math.prod(state.shape) * dtype.itemsize != len(state.data):
        raise ValueError(f"{len(state.data)} bytes for {state.dtype}{list(state.shape)}")
    array: Array = np.frombuffer(state.data, dtype).reshape(state.shape)
    return array.astype(dtype.newbyteorder("="))  # a copy, which updates may write to
