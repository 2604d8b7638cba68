"""``TorchState``: models, optimizers and samplers as elastic state, with a handler for each kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from hvdlab.collectives.elastic.election import elect, united
from hvdlab.collectives.elastic.state import News, ObjectState
from hvdlab.torch.basics import rank
from hvdlab.torch.elastic.place import first_rank
from hvdlab.torch.elastic.sampler import ElasticSampler
from hvdlab.torch.functions import allgather_object, broadcast_object, broadcast_parameters
from hvdlab.torch.optimizer_state import broadcast_optimizer_state

T = TypeVar("T")


class StateHandler(Generic[T]):
    """Saves, restores and synchronizes an object that is more than a value.

    Args:
        value: The object.

    Attributes:
        value: The object.
        root: The rank that :meth:`sync` takes the state of; ``None`` for the first that lives.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.root: int | None = None

    def save(self) -> None:
        """Keep a copy of its state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give it the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give it the state of the root, and save that; all ranks call it alike."""
        raise NotImplementedError

    def reset(self) -> None:
        """Training begins again with other ranks."""

    def set_value(self, value: T) -> None:
        """Take care of this object from now on."""
        self.value = value
        self.save()

    @property
    def root_rank(self) -> int:
        """The rank that :meth:`sync` takes the state of."""
        return first_rank() if self.root is None else self.root


class ModelStateHandler(StateHandler[torch.nn.Module]):
    """The parameters and buffers of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._saved = copy.deepcopy(model.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=self.root_rank)
        self.save()


class OptimizerStateHandler(StateHandler[torch.optim.Optimizer]):
    """The state and settings of an optimizer, distributed or not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved = copy.deepcopy(optimizer.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))  # it would train on the saved tensors

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=self.root_rank)
        self.save()

    def reset(self) -> None:
        """A half-finished step is void: others are somewhere else in theirs, or have no gradients at all."""
        self._load(self.value.state_dict())

    def _load(self, state: dict[str, Any]) -> None:
        self.value.load_state_dict(state)  # a distributed optimizer also lets go of what is in flight
        self.value.zero_grad()


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """The epoch of a sampler, and what all ranks together have processed in it."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self._saved = copy.deepcopy(sampler.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        state = _broadcast(self.value.state_dict(), self.root_rank)
        # What a rank has processed in another epoch than the root's says nothing about this one.
        mine = self.value.processed_indices if self.value.epoch == state["epoch"] else set()
        processed = set().union(*allgather_object(mine))
        self.value.load_state_dict({**state, "processed_indices": processed})
        self.save()

    def reset(self) -> None:
        self.value.reset()


class LoadableStateHandler(StateHandler[Any]):
    """Anything else with ``state_dict`` and ``load_state_dict``, such as a learning-rate scheduler."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(_broadcast(copy.deepcopy(self.value.state_dict()), self.root_rank))
        self.save()


Registry = Sequence[tuple[type | tuple[type, ...], type[StateHandler[Any]]]]

_registry: list[tuple[type | tuple[type, ...], type[StateHandler[Any]]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    ((torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler), LoadableStateHandler),
]


def get_handler_registry() -> list[tuple[type | tuple[type, ...], type[StateHandler[Any]]]]:
    """Which handler takes care of objects of which type; the first that fits is taken."""
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for states that are made, and attributes that are assigned, from now on."""
    _registry[:] = registry


def _handler_for(value: object) -> StateHandler[Any] | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


def _broadcast(obj: Any, root_rank: int) -> Any:
    return broadcast_object(obj) if root_rank == 0 else broadcast_object(obj, root_rank)


class TorchState(ObjectState):
    """The state of a training: what it takes to go on from here, on any rank.

    Each argument becomes an attribute. Models, optimizers, :class:`~hvdlab.torch.elastic.ElasticSampler`, schedulers and
    gradient scalers stay the objects they are, and their state is saved, restored and synchronized; assigning to such an
    attribute replaces the object. Anything else is a value (it is copied and pickled).

    Args:
        model: A model, if there is one of that name.
        optimizer: An optimizer; best the one that ``DistributedOptimizer`` returned.
        kwargs: Further ones, and values such as ``epoch=0``.
    """

    model: Any
    optimizer: Any
    _handlers: dict[str, StateHandler[Any]]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        handlers: dict[str, StateHandler[Any]] = {}
        values: dict[str, Any] = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = _handler_for(value)
            if handler is None:
                values[name] = value
            else:
                handlers[name] = handler
        object.__setattr__(self, "_handlers", handlers)  # the other attributes are assigned with their help
        self._root: int | None = None
        super().__init__(bcast_object=self._from_root, get_rank=rank, **values)
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make the state the same on all ranks: that of the rank which has committed most (at the start, the first)."""
        root, saves = elect(self._saves)
        for handler in self._handlers.values():
            handler.root = root
            handler.sync()
        self._root = root
        super().sync()
        self._saves = saves + 1

    def reset(self) -> None:
        self._root = None  # it may be gone
        for handler in self._handlers.values():
            handler.root = None
            handler.reset()

    def _agree(self, news: News) -> News:
        return united(news)

    def _from_root(self, obj: Any) -> Any:
        return _broadcast(obj, first_rank() if self._root is None else self._root)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self._handlers
        if name in handlers:
            handlers[name].set_value(value)
        elif name in self.__dict__.get("_saved_state", ()):
            handler = _handler_for(value)  # such as the model that is made after the state
            if handler is not None:
                handlers[name] = handler
                del self._saved_state[name]
        super().__setattr__(name, value)
