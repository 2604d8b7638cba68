"""``hvd.record()``: which step it was, and which batch: the last steps of a training, kept until they are needed.

What is kept of a step is a fingerprint of its inputs, its loss and the norm of its gradients, and as long as there is
room the batch itself. It is shown with an error, and ``%hvd_replay`` brings a batch to the notebook.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.visible import visible
from hvdlab.torch.compiling import untraced
from hvdlab.torch.fingerprints import of_tensor
from hvdlab.torch.watch import gradient_norm

MEMORY = 256 << 20
"""Bytes of batches that are kept."""

SAMPLED = 4096
"""Elements of an input that its fingerprint is made of."""

SHOWN = 3
"""Steps that are shown with an error, besides the first that is not finite."""

DEEPEST = 4
LONGEST_PATH = 120
"""Characters that are shown of an input's path, which is made of keys of the batch."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ATTRIBUTE = "_hvdlab_record"
_records: weakref.WeakSet[Record] = weakref.WeakSet()


@dataclass(slots=True)
class Input:
    """What is kept of a tensor among a step's inputs: some elements, and the least and the largest one."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sample: torch.Tensor
    ends: torch.Tensor | None

    @property
    def finite(self) -> bool:
        return self.ends is None or bool(torch.isfinite(self.ends).all())

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        odd = "" if self.finite else " NOT FINITE"
        return f"{visible(self.path, LONGEST_PATH)} {dtype}{list(self.shape)} #{of_tensor(self.sample).hex()[:6]}{odd}"


@dataclass(slots=True)
class Step:
    """A step; its ``batch`` is ``(args, kwargs)`` of the model's call, if it is kept."""

    number: int
    inputs: list[Input]
    batch: tuple[tuple[Any, ...], dict[str, Any]] | None
    nbytes: int
    generator: torch.Tensor
    loss: torch.Tensor | float | None = None
    norm: torch.Tensor | float | None = None

    @property
    def wrong(self) -> str:
        """The first thing about it that is not finite: ``inputs``, ``loss`` or ``gradients``; empty if all is."""
        if not all(one.finite for one in self.inputs):
            return "inputs"
        for value, name in ((self.loss, "loss"), (self.norm, "gradients")):
            if value is not None and not math.isfinite(float(value)):
                return name
        return ""

    def __str__(self) -> str:
        parts = [f"step {self.number}"]
        for value, name in ((self.loss, "loss"), (self.norm, "gradient norm")):
            if value is not None:
                parts.append(f"{name} {float(value):.6g}")
        return "  ".join([*parts, *map(str, self.inputs)])


@dataclass(slots=True)
class Replay:
    """A recorded step, elsewhere.

    Attributes:
        rank, step: Where and which it was.
        args, kwargs: What the model was called with.
        loss, gradient_norm: As recorded.
        generator: State of torch's random numbers before the call.
        text: All of it in one line.
    """

    rank: int
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: float | None
    gradient_norm: float | None
    generator: torch.Tensor = field(repr=False)
    text: str = field(repr=False, default="")

    def run(self, model: Any) -> Any:
        """Call ``model`` as it was called then, with the same random numbers (of the CPU). Returns what it returns."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.generator)
            return model(*self.args, **self.kwargs)


class Record:
    """What :func:`record` returns. It ends with :meth:`close`, or when the model is recorded anew.

    Attributes:
        steps: The last ones, oldest first.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        loss: torch.nn.Module | None,
        last: int,
        memory: int,
    ) -> None:
        self.steps: deque[Step] = deque(maxlen=last)
        self._model, self._memory, self._count = model, memory, 0
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
        _records.add(self)

    # -- while training -----------------------------------------------------------------------------------------------

    @untraced
    def batch(self, *args: Any, **kwargs: Any) -> None:
        """A step begins, with these inputs. A model that was given to :func:`record` says so itself."""
        self._count += 1
        tensors = list(_tensors(args, "")) + list(_tensors(kwargs, ""))
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        inputs = [_input(path, tensor) for path, tensor in tensors]
        self.steps.append(Step(self._count, inputs, (args, kwargs), nbytes, torch.get_rng_state()))
        room = self._memory
        for step in reversed(self.steps):
            room -= step.nbytes
            if room < 0:
                if step.batch is None:
                    break
                step.batch = None

    def loss(self, value: Any) -> None:
        """The loss of the step that runs: a number or a tensor with one element, which nothing waits for."""
        if self.steps:
            self.steps[-1].loss = value.detach() if isinstance(value, torch.Tensor) else float(value)

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
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.steps[-1].norm = gradient_norm(parameters)

    def close(self) -> None:
        """End it and forget what was recorded. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.steps.clear()
        _records.discard(self)
        if self._model is not None:
            vars(self._model).pop(_ATTRIBUTE, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- afterwards ---------------------------------------------------------------------------------------------------

    @property
    def first_wrong(self) -> Step | None:
        """The first step with something that is not finite, unless all was well again later on."""
        found = None
        for step in reversed(self.steps):
            if step.wrong:
                found = step
            elif step.loss is not None or step.norm is not None:  # it went as far as to tell
                break
        return found

    def lines(self) -> list[str]:
        """The last steps, and the first that is not finite, a line each."""
        wrong, last = self.first_wrong, list(self.steps)[-SHOWN:]
        if wrong is None:
            return [str(step) for step in last]
        mark = f"{wrong}   <- the first that is not finite: {wrong.wrong}"
        if not any(step is wrong for step in last):
            return [mark, "...", *map(str, last)]
        return [mark if step is wrong else str(step) for step in last]

    def replay(self, step: int | None = None) -> Replay:
        """A step to be sent elsewhere: this one, or the first that is not finite, or else the last.

        Raises:
            LookupError: It is not kept.
        """
        if step is None:
            found = self.first_wrong or (self.steps[-1] if self.steps else None)
        else:
            found = next((one for one in self.steps if one.number == step), None)
        if found is None:
            kept = (
                f"steps {self.steps[0].number} to {self.steps[-1].number} are" if self.steps else "no step is"
            )
            raise LookupError(f"step {step} is not kept; {kept}" if step is not None else f"{kept} kept")
        if found.batch is None:
            raise LookupError(
                f"the batch of step {found.number} is not kept; `memory=` of hvd.record() is too small"
            )
        rank = context.engine().rank if context.is_initialized() else 0
        loss, norm = (None if value is None else float(value) for value in (found.loss, found.norm))
        return Replay(rank, found.number, *found.batch, loss, norm, found.generator, str(found))

    def __repr__(self) -> str:
        return "\n".join([f"<Record of {self._count} steps, {len(self.steps)} kept>", *map(str, self.steps)])


def record(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    last: int = 50,
    loss: torch.nn.Module | None = None,
    memory: int = MEMORY,
) -> Record:
    """Keep what the last steps on this rank were made of, to be shown with an error and replayed.

    Every call of the model in training mode is a step. Calling it again for a model replaces what was there.

    Args:
        model: Whose inputs are kept. Without one, call ``batch(...)`` of what is returned.
        optimizer: Whose gradients' norm is kept, before each of its steps.
        last: How many steps are kept.
        loss: The module that computes the loss. Not needed if the model returns it; or call ``loss(value)``.
        memory: Bytes of batches that are kept; of older steps only the fingerprints are.

    Raises:
        InvalidRequestError: An argument is none of these.
    """
    for value, kind, name in (
        (model, torch.nn.Module, "model"),
        (optimizer, torch.optim.Optimizer, "optimizer"),
        (loss, torch.nn.Module, "loss"),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{name}= of hvd.record() is no {type(value).__name__}.")
    if last < 1:
        raise InvalidRequestError(f"last= is a number of steps from 1, not {last}.")
    if model is not None and (before := vars(model).get(_ATTRIBUTE)) is not None:
        before.close()
    made = Record(model, optimizer, loss, last, memory)
    if model is not None:
        object.__setattr__(model, _ATTRIBUTE, made)
    return made


def _tensors(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path or "input", value
    elif depth < DEEPEST and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}".lstrip("."), depth + 1)
    elif depth < DEEPEST and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{path}[{number}]", depth + 1)


@torch.no_grad()
def _input(path: str, tensor: torch.Tensor) -> Input:
    plain, ends = tensor.detach(), None
    if plain.layout is not torch.strided:
        return Input(path, tensor.dtype, tuple(tensor.shape), torch.empty(0), None)
    if plain.dtype in _FLOATS and plain.numel():
        ends = torch.stack(torch.aminmax(plain))
    some = plain if plain.is_contiguous() or not plain.dim() else plain[..., :4]
    flat = some.reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLED)].clone()
    return Input(path, tensor.dtype, tuple(tensor.shape), sample, ends)


# -- for the notebook's side --------------------------------------------------------------------------------------


def newest() -> Record | None:
    """The record with steps that was made last on this rank."""
    with_steps = [one for one in _records if one.steps]
    return max(with_steps, key=lambda one: one.steps[-1].number, default=None)


def recent() -> tuple[tuple[str, ...], str]:
    """The lines to be shown with an error, and the one about the first step that is not finite."""
    found = newest()
    if found is None:
        return (), ""
    wrong = found.first_wrong
    return tuple(found.lines()), "" if wrong is None else str(wrong)


def suspects() -> tuple[int, int, str] | None:
    """For the choice of a rank: how early something was not finite, how near to the inputs, and what step it was."""
    found = newest()
    if found is None:
        return None
    wrong = found.first_wrong
    if wrong is None:
        return (1 << 60, 3, str(found.steps[-1]))
    return (wrong.number, ("inputs", "loss", "gradients").index(wrong.wrong), str(wrong))


def replay(step: int | None = None) -> Replay:
    """:meth:`Record.replay` of the newest record. Raises ``LookupError`` if there is none."""
    found = newest()
    if found is None:
        raise LookupError("nothing was recorded; hvd.record(model, optimizer) before the training does")
    return found.replay(step)
