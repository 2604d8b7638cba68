"""Brings what one rank knows to others: modules are imported again, all else travels by the data plane.

One pickle has all variables, so that what they share stays shared: an optimizer's parameters are its model's. Large
arrays are not in it; each is broadcast from where it lies. Pickles go from rank to rank of one user and nowhere else.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import pickle
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from IPython.core.getipython import get_ipython

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.types import DType, OpKind
from hvdlab.kernel_ext.rank.cell_source import parse
from hvdlab.kernel_ext.rank.completion import user_items
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.wire.pickling import ValuePickler
from hvdlab.kernel_ext.wire.values import Snapshot, SnapshotLoaded

_NAMESPACE, _SHELL = "namespace", "shell"
"""What stands in a pickle for the user's namespace and for the shell, since each rank has its own."""

ATTEMPTS = 5
"""How often :func:`known` tries to pickle variables that a running cell changes meanwhile."""

SITE = "sync of variables"
"""What views and errors say in place of the user's line: there is none, since hvdlab itself runs the cell."""

Bytes = npt.NDArray[np.uint8]


def bring(source: int, targets: Sequence[int], without: Collection[str]) -> dict[str, Any]:
    """Bring the variables of one rank to others. Every rank of the world calls it alike, as a cell.

    Args:
        source: The rank that the variables come from.
        targets: Ranks that get them; what they have of the same names is replaced.
        without: Names of variables that are not brought.

    Returns:
        At the source ``names``, ``modules`` (names that were sent), ``failed`` (name to the reason why it was not)
        and ``nbytes``; on targets ``failed`` (modules that could not be imported) and ``error`` (why the values could not
        be taken, or empty); on other ranks nothing.

    Raises:
        MismatchError, AbortedError: Another rank failed; a target has either all of the values or none.
    """
    shell = get_ipython()
    engine = context.init()
    members = tuple(sorted({source, *targets}))
    everyone = members == tuple(sorted(engine.ranks()))
    group = 0 if everyone else engine.add_process_set(members)
    try:
        if engine.rank == source:
            return _give(shell, _Channel(engine, group, source), without)
        return _receive(shell, _Channel(engine, group, source)) if engine.rank in members else {}
    finally:
        if not everyone:
            engine.remove_process_set(group)


class _Channel:
    """Broadcasts from one rank to the other members of a process set."""

    def __init__(self, engine: Engine, group: int, source: int) -> None:
        self._engine, self._group, self._source = engine, group, source

    def numbers(self, values: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        self._run(values, DType.I64, name)
        return values

    def raw(self, data: Bytes, name: str) -> None:
        if data.nbytes:
            self._run(data, DType.U8, name)

    def _run(self, array: npt.NDArray[Any], dtype: DType, name: str) -> None:
        request = Request(
            OpKind.BROADCAST,
            f"variables.{name}",
            array,
            array,
            dtype,
            root=self._source,
            process_set=self._group,
            site=SITE,
        )
        self._engine.run(request)


# -- the rank that knows ----------------------------------------------------------------------------------------------


def _give(shell: Any, channel: _Channel, without: Collection[str]) -> dict[str, Any]:
    found = _collect(shell, without)
    arrays = [np.frombuffer(part, np.uint8) for part in found.parts]
    channel.numbers(np.array([len(arrays)], np.int64), "parts")
    channel.numbers(np.array([array.nbytes for array in arrays], np.int64), "sizes")
    for number, array in enumerate(arrays):
        channel.raw(array, f"part.{number}")
    nbytes = sum(array.nbytes for array in arrays)
    return {"names": found.names, "modules": found.modules, "failed": found.failed, "nbytes": nbytes}


@dataclass(frozen=True, slots=True)
class _Knowledge:
    """In ``parts`` the plan of imports with the cells, the pickle and its buffers; the names of the variables and modules
    that are in them, and name to reason for those that are not."""

    parts: list[memoryview]
    names: list[str]
    modules: list[str]
    failed: dict[str, str]


def known(shell: Any, ticket: int) -> tuple[Snapshot, list[memoryview]]:
    """Return this rank's variables and modules, while its main thread may be running a cell. Called on another thread.

    A cell that runs changes its variables meanwhile. What is part of an elastic state is made alike again when the rank
    that gets it enters the training; anything else is as it was at some moment of this call.
    """
    for attempt in range(ATTEMPTS):
        try:
            found = _collect(shell, ())
        except RuntimeError as error:  # a dictionary changed its size during iteration, say
            if attempt == ATTEMPTS - 1:
                return Snapshot(ticket, error=one_line(error)), []
        except Exception as error:  # noqa: BLE001  # pickling runs the user's code
            return Snapshot(ticket, error=one_line(error)), []
        else:
            sizes = tuple(part.nbytes for part in found.parts)
            answer = Snapshot(ticket, sizes, tuple(found.names), tuple(found.modules), found.failed)
            return answer, found.parts
    raise AssertionError("unreachable")


def _collect(shell: Any, without: Collection[str]) -> _Knowledge:
    items = [(name, value) for name, value in user_items(shell) if name not in without]
    modules = {name: value.__name__ for name, value in items if isinstance(value, ModuleType)}
    values = {name: value for name, value in items if name not in modules}
    imports = [*dict.fromkeys([*modules.values(), *_dotted(shell, modules)])]
    plan = pickle.dumps((list(sys.path), imports, modules, shell.compile.cells()))
    parts, failed = _pack(shell, values)
    sent = [name for name in values if name not in failed]
    return _Knowledge([memoryview(plan), *parts], sent, list(modules), failed)


def _dotted(shell: Any, modules: Collection[str]) -> list[str]:
    """Return the modules that cells imported as ``import package.module``, which binds the package alone."""
    history = shell.history_manager
    ran = [text or source for source, text in shell.compile.cells().values()]
    if history is not None:
        # Of a program's cells the history has none, and the compiler none of those that ipyparallel runs.
        ran += history.input_hist_parsed
    found: list[str] = []
    for source in dict.fromkeys(ran):
        try:
            tree = parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [a.name for a in node.names if "." in a.name and a.name.split(".")[0] in modules]
    return [name for name in found if name in sys.modules]


def _pack(shell: Any, values: dict[str, Any]) -> tuple[list[memoryview], dict[str, str]]:
    """Return one pickle of all values, with the buffers that belong to it, and what could not be in it, with the reason."""
    failed: dict[str, str] = {}
    with contextlib.suppress(
        Exception
    ):  # pickling runs the user's __reduce__; which value it was is found below
        return _dump(shell, values), failed
    for name, value in values.items():
        try:
            _dump(shell, {name: value})
        except Exception as error:  # noqa: BLE001  # as above
            failed[name] = one_line(error)
    return _dump(shell, {name: value for name, value in values.items() if name not in failed}), failed


def _dump(shell: Any, values: dict[str, Any]) -> list[memoryview]:
    stream, buffers = io.BytesIO(), list[memoryview]()
    _Pickler(stream, shell, buffers).dump(values)
    return [stream.getbuffer(), *buffers]


class _Pickler(ValuePickler):
    """Leaves tensors on their devices; functions made in cells keep finding the variables of the rank they come to."""

    def __init__(self, file: Any, shell: Any, buffers: list[memoryview]) -> None:
        super().__init__(file, None, buffers, move=False)
        self._of_shell = shell

    def persistent_id(self, obj: Any) -> str | None:
        if obj is self._of_shell.user_ns:
            return _NAMESPACE
        return _SHELL if obj is self._of_shell else None

    def reducer_override(self, obj: Any) -> Any:
        # cloudpickle would give the function a copy of the globals that it uses. It is to use the variables
        # of the rank that it comes to.
        if type(obj) is FunctionType and obj.__globals__ is self._of_shell.user_ns:
            state = {name: getattr(obj, name) for name in _STATE}
            arguments = (obj.__code__, obj.__globals__, obj.__name__, None, obj.__closure__)
            return FunctionType, arguments, (state, obj.__dict__), None, None, _complete_function
        if type(obj) is CellType:
            # Two functions that share a variable go on to share it, and one that calls itself leads back to itself.
            try:
                return CellType, (), (obj.cell_contents,), None, None, _fill_cell
            except ValueError:  # it is empty
                return CellType, ()
        return super().reducer_override(obj)


_STATE = ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__qualname__", "__module__")


def _complete_function(function: FunctionType, state: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
    for name, value in state[0].items():
        setattr(function, name, value)
    function.__dict__.update(state[1])


def _fill_cell(cell: CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents


# -- a rank that learns -----------------------------------------------------------------------------------------------


def _receive(shell: Any, channel: _Channel) -> dict[str, Any]:
    (count,) = channel.numbers(np.zeros(1, np.int64), "parts")
    sizes = channel.numbers(np.zeros(int(count), np.int64), "sizes")
    parts = [np.empty(int(size), np.uint8) for size in sizes]
    for number, part in enumerate(parts):
        channel.raw(part, f"part.{number}")
    return _absorb(shell, [part.data for part in parts])


class PendingSnapshot:
    """Variables and modules of another rank (:func:`known`), to be bound here once this rank is in the world. Main thread.

    What training needs is complete only in the world: a ``DistributedOptimizer`` reduces gradients with the ranks there are.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts

    def prepare(self, shell: Any, ticket: int) -> SnapshotLoaded:
        """Import the modules and see that the values can be taken, while no other rank waits for this one."""
        taken = _absorb(shell, self._parts, bind=False)
        return SnapshotLoaded(ticket, taken["failed"], taken["error"])

    def take(self, shell: Any) -> None:
        """Bind the variables. Raises ``HvdlabError`` if that fails here."""
        if error := _absorb(shell, self._parts)["error"]:
            raise HvdlabError(f"what another rank knows could not be taken: {error}")


def _absorb(shell: Any, parts: Sequence[memoryview], *, bind: bool = True) -> dict[str, Any]:
    plan, stream, *buffers = parts
    # From a rank of the same user that runs the same cells: no less trusted than they are.
    path, imports, modules, cells = pickle.loads(plan)  # noqa: S301
    shell.compile.adopt(cells)
    # Before the values: unpickling imports their classes, perhaps from a directory of the source's own path.
    failed = _import(shell, path, imports, modules)
    try:
        values = _Unpickler(io.BytesIO(stream), shell, buffers).load()
    except Exception as error:  # noqa: BLE001  # unpickling runs the user's code
        return {"failed": failed, "error": one_line(error)}
    if bind:
        shell.push(values)
    return {"failed": failed, "error": ""}


def _import(
    shell: Any, path: Sequence[str], imports: Sequence[str], modules: Mapping[str, str]
) -> dict[str, str]:
    sys.path += [entry for entry in path if entry not in sys.path]
    failed: dict[str, str] = {}
    for module in imports:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # importing runs the module
            failed[module] = one_line(error)
    shell.push({name: sys.modules[module] for name, module in modules.items() if module not in failed})
    return failed


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, shell: Any, buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._of_shell = shell

    def persistent_load(self, pid: Any) -> Any:
        return self._of_shell.user_ns if pid == _NAMESPACE else self._of_shell
