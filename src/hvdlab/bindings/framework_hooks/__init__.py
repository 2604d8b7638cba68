"""Hooks of the notebook side into each framework, behind one class: how its arrays are read, its random states, ...

A framework is one file of this package, named as the module that users import (``torch.py`` for ``import torch``), with a
subclass of :class:`FrameworkHooks` whose instance is called ``HOOKS``. No list names it: :func:`loaded` finds the
file as soon as ``sys.modules`` has the framework. These files import no framework when they are imported, and not our
binding of it either. A rank's control thread calls the hooks while the rank's main thread may be in the middle of
``import torch``. A control thread that waited for the lock of that import could not answer the notebook. For the
same reason each hook must cope with a framework that is half imported.

Hooks give an array of any framework as an :class:`ArraySource`: bytes that can be read block by block, wherever they are.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.bindings import fingerprints

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from types import FrameType

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


class DeviceInspector(Protocol):
    """Inspector of an array's elements on their device, without moving them."""

    def fingerprints(self) -> bytes:
        """Return a fingerprint of :data:`~hvdlab.bindings.fingerprints.SIZE` bytes for each block, one behind the other; equal ones mean equal bytes.

        They are made by another method than on the host, so one may only be compared with one that a device has made.
        """
        ...

    def not_finite(self) -> tuple[int, int] | None:
        """Return how many of the elements are NaN, and how many infinite; ``None`` if only the host can count them."""
        ...


@dataclass(frozen=True, slots=True)
class ArraySource:
    """The elements of an array, in C order.

    Attributes:
        dtype: Its name, as users know it.
        shape, device, requires_grad: As the framework gives them; ``requires_grad`` is None where there is no such thing.
        nbytes: Of all elements.
        itemsize: Bytes of one.
        read: ``read(offset, length)``: these bytes, without a copy if they are in this process's memory.
        on_device: Inspects the elements where they are; ``None`` if it is as well to read them. Whether there is one depends on the kind of
            device and ``nbytes`` only, so it is the same on all ranks for arrays that are alike in these.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool | None
    nbytes: int
    itemsize: int
    read: Callable[[int, int], Bytes]
    on_device: DeviceInspector | None = None

    @property
    def block(self) -> int:
        """Return the bytes of a block with a fingerprint of its own; whole elements."""
        return max(1, fingerprints.BLOCK // self.itemsize) * self.itemsize

    def fingerprints(self, pool: ThreadPoolExecutor | None = None) -> bytes:
        """Return the fingerprints of the blocks, one behind the other: those of the device if it makes any, otherwise those of the bytes.

        Args:
            pool: Threads among which blocks that are read are divided.
        """
        if self.on_device is not None:
            return self.on_device.fingerprints()
        return fingerprints.of_blocks(self.nbytes, self.read, block=self.block, pool=pool)


def numpy_source(
    array: npt.NDArray[Any],
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> ArraySource:
    """Return a numpy array (without Python objects) as a source; another framework may give its own ``dtype``, ``shape``, ``device``."""
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)

    def read(offset: int, length: int) -> Bytes:
        return flat[offset : offset + length]

    return ArraySource(
        str(array.dtype) if dtype is None else dtype,
        tuple(array.shape if shape is None else shape),
        device,
        None,
        flat.nbytes,
        max(1, array.dtype.itemsize),
        read,
    )


Part = tuple[str, Any]
"""A part of a value, and the step that leads to it: ``.weight``, ``['lr']``, ``[3]``."""


class FrameworkHooks:
    """Hooks of one framework; the defaults report nothing. Hooks pass the framework's exceptions on.

    Attributes:
        preload: Whether the fork server imports the framework, if it is installed, before it forks ranks.
        binding: The module of ours that is imported along with it, if any.
        training: Modules that the framework itself imports when training begins.
        environment: Variables that a notebook's ranks set before the framework can be imported, by name; a variable that
            is set already stays as it is.
    """

    preload: bool = False
    binding: str = ""
    training: Sequence[str] = ()
    environment: Mapping[str, str] = MappingProxyType({})

    # -- values -------------------------------------------------------------------------------------------------------

    def array(self, value: Any) -> ArraySource | None:
        """Return the elements of an array of this framework; None if ``value`` is no such array, or has no plain elements."""
        return None

    def beside(self, value: Any) -> Iterable[Part]:
        """Return the parts of a value (an array for which :meth:`array` gave a source) besides its elements, such as a scale."""
        return ()

    def is_all_elements(self, kind: type) -> bool:
        """Return whether the attributes of an array of this kind add nothing to its elements and :meth:`beside`."""
        return False

    def is_plain(self, kind: type) -> bool:
        """Return whether a value of this kind is small, has no parts, and is known to :meth:`plain`."""
        return False

    def plain(self, value: Any) -> tuple[bytes, str]:
        """Return the bytes by which two values of a type are compared, and the value in words. For types that :meth:`is_plain` accepts."""
        raise NotImplementedError

    def parts(self, value: Any) -> Iterable[Part] | None:
        """Return the parts of a value that has an own shape in this framework: a module, a table.

        Returns:
            All parts in which two such values could differ; None if they can't be had.

        Raises:
            NotOurs: It is no such value.
        """
        raise NotOurs

    def live_arrays(self) -> Iterator[Any]:
        """Yield arrays of this framework that are alive, also those without a name. Empty if there is no cheap way."""
        return iter(())

    def memory(self, value: Any) -> tuple[str, int, int] | None:
        """Return device, address and size in bytes of a value's memory; None if it is no array of this framework or has none."""
        return None

    def gradient(self, value: Any) -> Any:
        """Return the gradient that is kept with a value; None if there is none."""
        return None

    def nbytes(self, value: Any) -> int:
        """Return the size of an array in bytes, without reading its elements; 0 for a value that is no array of this framework."""
        return 0

    def reduce(self, value: Any, *, move: bool, apart: int | None) -> Any:
        """Return how a value, an array, is pickled for another process; ``NotImplemented`` if as it pickles itself.

        Args:
            move: Whether arrays of other devices become CPU arrays.
            apart: Bytes from which an array's elements are given as a numpy array, to stay out of the pickle; None if
                nothing may.
        """
        return NotImplemented

    # -- the process --------------------------------------------------------------------------------------------------

    def random_states(self) -> dict[str, Any]:
        """Return states of the generators that all code of a process shares, by name."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return version and settings that make results differ."""
        return {}

    def current_device(self) -> str:
        """Return the device that new arrays of the calling thread go to, such as ``cuda:1``; empty if that is the CPU."""
        return ""

    def devices_in_use(self) -> list[tuple[int, str]] | None:
        """Return the number and UUID of each GPU on which this framework has memory; None as long as it uses none."""
        return None

    def device_memory(self) -> int:
        """Return the bytes of GPUs' memory that this framework holds for this process. Cheap; any thread."""
        return 0

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads; called in a forked rank, once."""

    def reseed(self) -> None:
        """Give this process random numbers of its own; called in a forked rank, once."""

    def modes(self) -> Any:
        """Return the modes of the calling thread that this framework's context managers switch. Cheap: called before each cell."""
        return None

    def must_return(self, frame: FrameType) -> bool:
        """Return whether native code of this framework has called the code of this frame, and is of no use after an exception of it.

        An interrupt is not raised there: it ends the collectives that the native code waits for next
        (``Engine.hold_interrupt``), and their exception ends the native code as their failure would.

        Args:
            frame: The innermost frame of the main thread.
        """
        return False

    def restore_modes(self, interrupt: BaseException, modes: Any) -> None:
        """Switch a mode back where a context manager of this framework was interrupted before it could.

        Args:
            interrupt: The exception that has ended the cell, with its traceback. Where that does not pass through such a context
                manager, the modes are as the cell's own code has set them, and stay.
            modes: The result of :meth:`modes` before the cell; None if the framework was imported by the cell.
        """


class NotOurs(Exception):
    """Error: a value is not of the requested kind."""


@functools.cache
def names() -> tuple[str, ...]:
    """Return the frameworks that have hooks, by the module that users import."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def hooks_of(name: str) -> FrameworkHooks:
    """Return the hooks of one of :func:`names`, also of a framework that was not imported."""
    hooks = importlib.import_module(f"{__name__}.{name}").HOOKS
    assert isinstance(hooks, FrameworkHooks)
    return hooks


def loaded() -> Iterator[FrameworkHooks]:
    """Yield the hooks of the frameworks that this process has imported. Cheap; any thread."""
    for name in names():
        # ``sys.modules`` also has ``None`` for a module whose import is to fail.
        if sys.modules.get(name) is not None:
            yield hooks_of(name)


def set_environment() -> None:
    """Set the variables of all frameworks' hooks (:attr:`FrameworkHooks.environment`) in this process, where unset."""
    for name in names():
        for variable, value in hooks_of(name).environment.items():
            os.environ.setdefault(variable, value)


def modes() -> dict[str, Any]:
    """Return the calling thread's modes of each framework that this process has imported, by the framework's name."""
    return {name: hooks_of(name).modes() for name in names() if sys.modules.get(name) is not None}


def restore_modes(interrupt: BaseException, before: Mapping[str, Any]) -> None:
    """Call each imported framework's :meth:`FrameworkHooks.restore_modes`; ``before`` is a result of :func:`modes`."""
    for name in names():
        if sys.modules.get(name) is not None:
            hooks_of(name).restore_modes(interrupt, before.get(name))


def must_return(frame: FrameType) -> bool:
    """Return whether :meth:`FrameworkHooks.must_return` of any imported framework is true for this frame."""
    return any(hooks.must_return(frame) for hooks in loaded())


def devices_in_use() -> list[tuple[int, str]] | None:
    """Return the number and UUID of each GPU that any framework has memory on; None as long as none of them uses one."""
    found = [used for hooks in loaded() if (used := hooks.devices_in_use()) is not None]
    return sorted({device for used in found for device in used}) if found else None


def device_memory() -> int:
    """Return the bytes of GPUs' memory that frameworks hold for this process."""
    return sum(hooks.device_memory() for hooks in loaded())


def module_of(kind: type) -> str:
    """Return the top-level module that a type names as its own."""
    return str(kind.__module__).partition(".")[0]


def is_instance_type(kind: type, module: str, name: str) -> bool:
    """Return whether a type is ``module.name`` or derived from it, if that has been imported."""
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(kind, base)


class FrameworkPreloads:
    """A :class:`~hvdlab.launch.forkserver.program.Preloads` that adds nothing to the requested modules.

    It imports frameworks in a process that forks ranks, and renews the state of frameworks that a fork must not share.

    Attributes:
        required: Nothing.
    """

    required: Sequence[str] = ()

    def after_required(self) -> None:
        """Set the variables that frameworks read when they are imported."""
        set_environment()

    def usual(self) -> Sequence[str]:
        """Return frameworks whose hooks ask to be preloaded."""
        return tuple(name for name in names() if hooks_of(name).preload)

    def along_with(self, framework: str) -> Sequence[str]:
        """Return our binding of a framework, by the framework's hooks; an empty sequence for a framework without hooks."""
        known = framework in names()
        binding = hooks_of(framework).binding if known else ""
        return (binding,) if binding else ()

    def for_training(self) -> Sequence[str]:
        """Return the modules that the hooks of the imported frameworks name."""
        return [module for hooks in loaded() for module in hooks.training]

    def refresh(self, threads: int) -> None:
        """Make new random states and thread pools for the frameworks that were imported before the fork."""
        for hooks in loaded():
            hooks.reseed()
            hooks.set_threads(threads)
