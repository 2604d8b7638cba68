"""``hvd.record()``: keeps the last steps of a training, so that an error can show its step and batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hvdlab.bindings.step_record import MEMORY, SAMPLED, Input, StepRecord, tensors
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.compiling import untraced
from hvdlab.torch.fingerprints import of_tensor
from hvdlab.torch.watch import gradient_norm

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ATTRIBUTE = "_hvdlab_record"


@dataclass(frozen=True, slots=True)
class TorchSample:
    """Some elements of a tensor, and the smallest and the largest one. They stay on its device: the training waits for none."""

    elements: torch.Tensor
    ends: torch.Tensor | None

    @property
    def finite(self) -> bool:
        return self.ends is None or bool(torch.isfinite(self.ends).all())

    def digest(self) -> bytes:
        return of_tensor(self.elements)


@dataclass(frozen=True, slots=True)
class TorchGenerator:
    """The state of torch's random number generator of the CPU."""

    state: torch.Tensor

    @contextmanager
    def restored(self, model: Any) -> Iterator[None]:
        """In this context the random numbers of that time come again; afterwards they go on as before."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield


class Record(StepRecord):
    """What :func:`record` returns. Recording ends with :meth:`close`, or when the model is recorded anew.

    Attributes:
        steps: The last steps, the oldest first.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        loss: torch.nn.Module | None,
        last: int,
        memory: int,
    ) -> None:
        super().__init__(last, memory)
        self._model = model
        self._hooks: list[Any] = []
        if model is not None:
            self._hooks += [
                model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                model.register_forward_hook(self._after_forward),
            ]
        if loss is not None:
            self._hooks.append(loss.register_forward_hook(self._after_forward))
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    @untraced
    def batch(self, *args: Any, **kwargs: Any) -> None:
        """Begin a step with these inputs. The hooks of a model that was given to :func:`record` call it for you.

        Args:
            args, kwargs: The arguments of the model's call. Tensors are found in nested lists, tuples and mappings, too.
        """
        found = [*tensors(args, _is_tensor), *tensors(kwargs, _is_tensor)]
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in found)
        inputs = [_input(path, tensor) for path, tensor in found]
        self.begin(inputs, (args, kwargs), nbytes, TorchGenerator(torch.get_rng_state()))

    def loss(self, value: Any) -> None:
        """Set the loss of the step that runs: a number, or a tensor with one element, which may still be computed on a GPU."""
        self.set_loss(value.detach() if isinstance(value, torch.Tensor) else float(value))

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.batch(*args, **kwargs)

    @untraced
    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
            if isinstance(found, torch.Tensor) and found.numel() == 1:
                self.loss(found)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.steps:
            self.set_norm(gradient_norm([p for group in optimizer.param_groups for p in group["params"]]))

    def close(self) -> None:
        """Stop recording and forget what was recorded. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().close()
        if self._model is not None:
            vars(self._model).pop(_ATTRIBUTE, None)


def record(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    last: int = 50,
    loss: torch.nn.Module | None = None,
    memory: int = MEMORY,
) -> Record:
    """Keep the inputs, loss and norm of the gradients of the last steps on this rank, to show them with errors and replay them.

    Every call of the model in training mode, with gradients enabled, begins a step. Calling it again for a model replaces the
    earlier record.

    Args:
        model: The model whose inputs are kept. Without it, call ``batch(...)`` of the record at each step.
        optimizer: The norm of its gradients is kept, before each of its steps.
        last: How many steps are kept.
        loss: The module that computes the loss. Not needed if the model returns the loss, as a tensor with one element or in an
            attribute ``loss``. Or call ``loss(value)`` of the record.
        memory: Bytes of batches that are kept, 256 MiB by default; of steps before them only the fingerprints remain.

    Returns:
        The record, which ``close()`` ends; it can be used as a context manager.

    Raises:
        InvalidRequestError: An argument has the wrong type, or ``last`` is less than 1.
    """
    for value, kind, name in (
        (model, torch.nn.Module, "model"),
        (optimizer, torch.optim.Optimizer, "optimizer"),
        (loss, torch.nn.Module, "loss"),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{name}= of hvd.record() is no {type(value).__name__}.")
    if model is not None and (before := vars(model).get(_ATTRIBUTE)) is not None:
        before.close()
    made = Record(model, optimizer, loss, last, memory)
    if model is not None:
        object.__setattr__(model, _ATTRIBUTE, made)
    return made


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@torch.no_grad()
def _input(path: str, tensor: torch.Tensor) -> Input:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    plain, ends = tensor.detach(), None
    if plain.layout is not torch.strided:
        return Input(path, kind, TorchSample(torch.empty(0), None))
    if plain.dtype in _FLOATS and plain.numel():
        ends = torch.stack(torch.aminmax(plain))
    some = plain if plain.is_contiguous() or not plain.dim() else plain[..., :4]
    flat = some.reshape(-1)
    return Input(path, kind, TorchSample(flat[:: max(1, flat.numel() // SAMPLED)].clone(), ends))
