"""``TorchState``: models, optimizers and samplers as elastic state, with a handler for each kind."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdlab.bindings.elastic_sampler import ElasticSampler
from hvdlab.bindings.elastic_state import (
    Entries,
    HandledState,
    HandlerRegistry,
    Kinds,
    LoadableStateHandler,
    SamplerStateHandler,
    StateHandler,
)
from hvdlab.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "LoadableStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class ModelStateHandler(StateHandler[torch.nn.Module]):
    """The parameters and buffers of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._saved = copy.deepcopy(model.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # No copy, as an optimizer's state needs it: a module copies the values into its own tensors.
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        # The broadcast writes into the model itself, whose own tensors a state dict has.
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
        self._load(
            copy.deepcopy(self._saved)
        )  # otherwise the optimizer would go on to change the saved tensors

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=self.root_rank)
        self.save()

    def reset(self) -> None:
        """Drop the step that was in progress: other ranks are at another point of it, or have no gradients at all."""
        self._load(self.value.state_dict())

    def _load(self, state: dict[str, Any]) -> None:
        self.value.load_state_dict(state)  # a distributed optimizer also drops the allreduces in flight
        self.value.zero_grad()


_registry = HandlerRegistry(
    [
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
        ((torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler), LoadableStateHandler),
    ]
)


def get_handler_registry() -> list[tuple[Kinds, type[StateHandler[Any]]]]:
    """Return the types of objects and the handler for each, as a list of pairs; the first pair that fits an object counts."""
    return list(_registry.entries)


def set_handler_registry(registry: Entries) -> None:
    """Use these handlers for states that are made, and attributes that are assigned, from now on.

    Args:
        registry: Pairs of a type, or a tuple of types, and the subclass of :class:`StateHandler` for their objects; the first
            pair that fits an object counts.
    """
    _registry.entries = list(registry)


class TorchState(HandledState):
    """The state of a training: all that is needed to go on from here, on any rank.

    Each argument becomes an attribute. Models, optimizers, :class:`~hvdlab.torch.elastic.ElasticSampler`, schedulers and
    gradient scalers stay the objects that they are, and their state is saved, restored and synchronized; assigning to such an
    attribute replaces the object. Any other object is a value, which is copied and pickled.

    Args:
        model: The model; ``None`` if it is passed under another name, or assigned later.
        optimizer: The optimizer, preferably the one that ``DistributedOptimizer`` returned; ``None`` as above.
        kwargs: Further objects of these kinds, and values such as ``epoch=0``.
    """

    model: Any
    optimizer: Any

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(_registry, model=model, optimizer=optimizer, **kwargs)
