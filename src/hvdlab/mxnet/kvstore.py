"""hvdlab's stores as stores of MXNet's, for ``mx.kv.create`` and ``gluon.Trainer``."""

from __future__ import annotations

import copy
from typing import Any

import mxnet as mx  # pyright: ignore[reportMissingImports]

from hvdlab import kvstore
from hvdlab.collectives.kvstore import lr_schedulers
from hvdlab.collectives.kvstore.allreduce_stores import DistSyncStore
from hvdlab.collectives.kvstore.optimizer_state import write_file
from hvdlab.collectives.kvstore.server_store import ServerStore
from hvdlab.collectives.process_sets import ProcessSet
from hvdlab.kvstore import create_native

_mxnets_create = mx.kvstore.create

_ON_SERVERS = ("SGD", "NAG", "Adam", "AdaGrad", "RMSProp", "Test")
"""MXNet's optimizers of which hvdlab has the same formulas."""


class Horovod(kvstore.Horovod, mx.kvstore.KVStoreBase):  # type: ignore[misc]  # MXNet has no types
    __doc__ = kvstore.Horovod.__doc__


class BytePS(kvstore.BytePS, mx.kvstore.KVStoreBase):  # type: ignore[misc]  # MXNet has no types
    __doc__ = kvstore.BytePS.__doc__


def register_stores() -> None:
    """Let ``mx.kv.create`` make stores of the types ``horovod`` and ``byteps``.

    MXNet 1.9.1 has neither and makes a local store of these names. ``gluon.Trainer`` makes no store at all of a name where a
    parameter has one context: give it the store that ``mx.kv.create("horovod")`` returns.

    Errors of stores are instances of ``mx.MXNetError`` from now on.
    """
    for store in (Horovod, BytePS):
        mx.kvstore.KVStoreBase.register(store)
    kvstore.KVStoreError.count_as(mx.MXNetError)


class _StatesOfMXNet(kvstore.KVStore):
    """A store that saves and loads the states of MXNet's optimizers in MXNet's format."""

    #: MXNet's updater, if an optimizer of MXNet's runs here.
    _mxnets_updater: Any = None

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer to a file: for one of MXNet's in MXNet's format, otherwise in hvdlab's.

        Args:
            fname: Its path.
            dump_optimizer: Also write the optimizer itself.
        """
        if self._mxnets_updater is None:
            super().save_optimizer_states(fname, dump_optimizer)
            return
        self._finish_pushes()
        write_file(fname, self._mxnets_updater.get_states(dump_optimizer))

    def load_optimizer_states(self, fname: str) -> None:
        """Load the states that :meth:`save_optimizer_states`, or a store of MXNet's, wrote.

        MXNet's files are pickles, which run code when they are read: read only those that you trust.

        Args:
            fname: The path of the file.
        """
        if self._mxnets_updater is None:
            super().load_optimizer_states(fname)
            return
        self._finish_pushes()
        with open(fname, "rb") as file:
            self._mxnets_updater.set_states(file.read())


class _OneProcessStore(_StatesOfMXNet, mx.kvstore.KVStore):  # type: ignore[misc]  # MXNet has no types
    """Store of hvdlab's that counts as one of MXNet's own; it has none of MXNet's inside."""

    def __del__(self) -> None:
        """Do nothing: MXNet has no handle to free."""

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored values by pushed values; see :meth:`hvdlab.kvstore.KVStore.set_optimizer`.

        Args:
            optimizer: An ``mx.optimizer.Optimizer``, or one that hvdlab's stores accept.
        """
        mxnets_updater = None
        if isinstance(optimizer, mx.optimizer.Optimizer):
            optimizer = mxnets_updater = mx.optimizer.get_updater(optimizer)
        super().set_optimizer(optimizer)
        # Once the store has accepted it, as in a store of several workers.
        self._mxnets_updater = mxnets_updater


class _SynchronousStore(_StatesOfMXNet, DistSyncStore, mx.kvstore.KVStore):  # type: ignore[misc]  # MXNet has no types
    """Store of several workers that counts as one of MXNet's own."""

    def __del__(self) -> None:
        """Do nothing: MXNet has no handle to free."""

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored values by pushed values; see :func:`hvdlab.kvstore.create`.

        Args:
            optimizer: An ``mx.optimizer.Optimizer``, which is copied, or one that hvdlab's stores accept. Alike on all workers.
        """
        mxnets_updater = None
        if isinstance(optimizer, mx.optimizer.Optimizer):
            own = copy.deepcopy(optimizer)
            self._multi_precision = own.multi_precision
            optimizer = mxnets_updater = mx.optimizer.get_updater(own)
        super().set_optimizer(optimizer)
        # Once the store has accepted it: after an error, the states that are saved are still those of the
        # former one.
        self._mxnets_updater = mxnets_updater


class _ServedStore(ServerStore, mx.kvstore.KVStore):  # type: ignore[misc]  # MXNet has no types
    """Store on parameter servers that counts as one of MXNet's own."""

    def __del__(self) -> None:
        """Do nothing: MXNet has no handle to free."""

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored values on the servers by pushed values; see :func:`hvdlab.kvstore.create`.

        Args:
            optimizer: MXNet's SGD, NAG, Adam, AdaGrad, RMSProp or Test, of which hvdlab has the same formulas, with a scheduler of
                MXNet's or none; or an optimizer that hvdlab's stores accept. Alike on all workers. Learning rate and multipliers are those of now; parameters' own are among
                them.

        Raises:
            KVStoreError: It is another optimizer of MXNet's, or has another scheduler of the learning rate: servers run without MXNet.
        """
        if isinstance(optimizer, mx.optimizer.Optimizer):
            optimizer = _ours(optimizer)
        super().set_optimizer(optimizer)


def _ours(theirs: Any) -> kvstore.optimizer.Optimizer:
    """Return hvdlab's optimizer with the arithmetic and the settings of one of MXNet's."""
    name = type(theirs).__name__
    if name not in _ON_SERVERS or getattr(mx.optimizer, name) is not type(theirs):
        raise kvstore.KVStoreError(
            f"servers have the optimizers {', '.join(_ON_SERVERS)}, not MXNet's {name}; a dist_sync store runs it on the workers"
        )
    ours = kvstore.optimizer.create(name)
    for attribute in vars(ours).keys() & vars(theirs).keys():
        setattr(ours, attribute, copy.copy(getattr(theirs, attribute)))
    scheduler = theirs.lr_scheduler
    kind = type(scheduler).__name__
    if kind in lr_schedulers.KINDS and getattr(mx.lr_scheduler, kind) is type(scheduler):
        ours.lr_scheduler = lr_schedulers.restored(kind, vars(scheduler))
    return ours


def install_kvstore() -> None:
    """Let ``mx.kv.create``, and a name given to ``gluon.Trainer``, make hvdlab's stores of all types.

    They are instances of ``mx.kvstore.KVStore`` and accept optimizers of MXNet's. Values, gradients and outputs may be row-sparse arrays
    of MXNet's. Classes that were registered with MXNet are made as before. May be
    called again.
    """
    mx.kvstore.create = _create


def uninstall_kvstore() -> None:
    """Let ``mx.kv.create`` make MXNet's own stores again. Those that were made stay as they are."""
    mx.kvstore.create = _mxnets_create


def _create(name: str = "local", process_set: ProcessSet | None = None) -> Any:
    """Make a key-value store; see :func:`hvdlab.kvstore.create`."""
    if not isinstance(name, str):
        raise TypeError("name must be a string")
    wanted = name.lower()
    if wanted in mx.kvstore.KVStoreBase.kv_registry:
        made = mx.kvstore.KVStoreBase.kv_registry[wanted]
        return made() if process_set is None else made(process_set)
    return create_native(wanted, _OneProcessStore, _SynchronousStore, _ServedStore, process_set)
