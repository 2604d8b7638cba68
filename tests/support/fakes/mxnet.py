"""The names of MXNet that hvdlab's binding takes at its import, without MXNet: classes without behaviour, and one updater."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar


class NDArray:
    pass


class MXNetError(RuntimeError):
    pass


class Optimizer:
    """An optimizer whose states are its own name."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.rescale_grad = 1.0
        self.multi_precision = False


class Updater:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, index: Any, gradient: Any, weight: Any) -> None:
        """Leave the weight as it is."""

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        return self.optimizer.name.encode()


class Trainer:
    pass


class KVStoreBase:
    kv_registry: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(store: Any) -> Any:
        return store


class KVStore(KVStoreBase):
    pass


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def fake_mxnet() -> ModuleType:
    """Return a module for ``sys.modules["mxnet"]``."""
    return _module(
        "mxnet",
        MXNetError=MXNetError,
        nd=_module("mxnet.nd", NDArray=NDArray),
        optimizer=_module("mxnet.optimizer", Optimizer=Optimizer, get_updater=Updater),
        gluon=_module("mxnet.gluon", Trainer=Trainer),
        kvstore=_module("mxnet.kvstore", KVStore=KVStore, KVStoreBase=KVStoreBase, create=None),
    )
