"""``hvd.watch()``, ``hvd.record()`` and ``hvd.watch_divergence()``: monitors of a model's training, without a line in its loop.

A watch records metrics of steps. A record keeps the last steps so that an error can show its step and batch. A divergence watch
raises an error when the ranks' models are no longer the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hvdlab.bindings.fingerprints import SIZE
from hvdlab.bindings.monitoring import (
    DIVERGENCE_WATCH,
    ELEMENTS,
    MOST_SAMPLED,
    DivergenceWatch,
    StepMeter,
    TrainingWatch,
    check_every,
    record_metric,
)
from hvdlab.bindings.step_record import MEMORY, SAMPLED, Input, StepRecord, tensors
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.sampler import GRADIENT_NORM, LEARNING_RATE, LOSS_SCALE
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.torch.dynamo import untraced
from hvdlab.torch.fingerprints import of_tensor
from hvdlab.torch.mpi_ops import allgather

_WATCH = "_hvdlab_watch"
_HALF = (torch.float16, torch.bfloat16)


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that is used here."""

    def get_scale(self) -> float: ...


class TorchWatch(TrainingWatch):
    """Recording of a training, from :func:`watch`. It ends with :meth:`close`, or when the optimizer is watched again."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batch_size: float | None,
        scaler: Scaler | None,
        every: int,
    ) -> None:
        super().__init__(model, meter_of(optimizer), batch_size, every)
        self._optimizer = optimizer
        self._scaler = scaler
        self._meter.batch_size = batch_size
        self._scalars = AsyncScalars(record_metric)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and context.is_initialized()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        step = self._meter.count + 1
        if not self._due(step):
            return
        now = time.monotonic_ns()
        if self._scaler is not None:
            record_metric(LOSS_SCALE, self._scaler.get_scale(), step, now)
        if not _closure(args, kwargs):
            self._norm(optimizer, step, now)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        step, now = self._meter.count, time.monotonic_ns()  # the meter's hook ran before this one
        self._scalars.poll()
        if context.is_initialized():
            for name, rate in learning_rates(optimizer):
                record_metric(name, rate, step, now)
        if self._due(step) and _closure(args, kwargs):  # gradients come from the closure
            self._norm(optimizer, step, now)

    def _norm(self, optimizer: torch.optim.Optimizer, step: int, now: int) -> None:
        norm = gradient_norm(self._model.parameters())
        if norm is None:
            return
        # A GradScaler sets this attribute on a fused optimizer, which divides by it itself.
        scale = getattr(optimizer, "grad_scale", None)
        self._scalars.add(GRADIENT_NORM, norm if scale is None else norm / scale, step, now)

    def close(self) -> None:
        """Record no more learning rates, norms of gradients and loss scales. Idempotent.

        The optimizer's step times are still recorded.
        """
        for hook in self._hooks:
            hook.remove()
        self._scalars.drain()
        # A later watch of the optimizer stays known, also if this one is closed once more.
        if vars(self._optimizer).get(_WATCH) is self:
            del vars(self._optimizer)[_WATCH]


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch_size: float | None = None,
    scaler: Scaler | None = None,
    every: int = 10,
) -> TorchWatch:
    """Record metrics of the training on this rank: step time, learning rate, norm of the gradients.

    ``docs/reference/metrics.md`` has the names and the cost of each. Calling it again for the same optimizer replaces the earlier
    watch, so a cell may be run twice.

    Args:
        model: The model whose gradients are measured.
        optimizer: The optimizer whose steps are counted, distributed or not.
        batch_size: Samples that this rank trains with in a step, for samples per second; ``None`` if that is not known.
        scaler: The ``torch.amp.GradScaler``, for the loss scale; ``None`` if there is none.
        every: After how many steps the norm of the gradients and the loss scale are recorded; 0 for never.

    Returns:
        The watch, whose ``batch_size`` and ``step`` may be set later, and which ``close()`` ends; it can be used as a context
        manager.

    Raises:
        InvalidRequestError: An argument has the wrong type, ``every`` is negative, or ``batch_size`` is not positive and finite.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequestError(f"hvd.watch() takes a torch.nn.Module, not a {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(f"hvd.watch() takes a torch optimizer, not a {type(optimizer).__name__}.")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise InvalidRequestError(f"scaler= is a torch.amp.GradScaler, not a {type(scaler).__name__}.")
    check_every(every)
    before: TorchWatch | None = vars(optimizer).get(_WATCH)
    if before is not None:
        before.close()
    made = TorchWatch(model, optimizer, batch_size, scaler, every)
    vars(optimizer)[_WATCH] = made
    return made


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the 2-norm of all gradients together, as a tensor with one element; ``None`` if there are none."""
    norms = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        wide = torch.float32 if gradient.dtype in _HALF else None  # the squares of float16 would overflow
        norms.append(torch.linalg.vector_norm(gradient, dtype=wide))
    if not norms:
        return None
    # A model can be spread over several devices, and stack() takes tensors of one.
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def learning_rates(optimizer: torch.optim.Optimizer) -> list[tuple[str, float]]:
    """Return the name and value of each learning rate: a single one if all parameter groups have the same."""
    groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    if len(rates) == len(groups) and len(set(rates)) > 1:
        labels = [str(group.get("name", number)) for number, group in enumerate(groups)]
        return [(f"{LEARNING_RATE}/{label}", rate) for label, rate in zip(labels, rates, strict=True)]
    return [(LEARNING_RATE, rate) for rate in rates[:1]]


def _closure(args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a closure was given to the step; the first argument in ``args`` is the optimizer itself."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


_STEPS = "_hvdlab_steps"


def meter_of(optimizer: torch.optim.Optimizer) -> StepMeter:
    """Return the meter of this optimizer's steps. The first call makes it, and registers a hook that counts the steps from then on.

    A distributed optimizer has the same meter as the optimizer that it was made from, since it has the same hooks.
    """
    found: StepMeter | None = vars(optimizer).get(_STEPS)
    if found is None:
        found = meter = StepMeter()

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            meter.step()

        optimizer.register_step_post_hook(stepped)
        vars(optimizer)[_STEPS] = found
    return found


MOST_WAITING = 64
"""Numbers that may wait for a GPU; with one more, the training waits for the oldest."""

RecordNumber = Callable[[str, float, int, int], None]


class CudaEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _PendingScalar(NamedTuple):
    name: str
    copy: torch.Tensor
    done: CudaEvent
    step: int
    time_ns: int


class AsyncScalars:
    """Recorder of numbers once a GPU has computed them, with the step and the time at which they were added.

    Args:
        record: Called with the name, the value, the step, and the time in ns.
    """

    def __init__(self, record: RecordNumber) -> None:
        self._record = record
        #: Numbers on their way from a GPU, the oldest first.
        self._waiting: deque[_PendingScalar] = deque()

    def add(self, name: str, value: torch.Tensor, step: int, time_ns: int) -> None:
        """Record a tensor with one element: at once, or later if it is on a CUDA device."""
        if value.device.type != "cuda":
            self._record(name, float(value.item()), step, time_ns)
            return
        # torch makes such a copy in page-locked memory, so that this thread does not wait for the GPU.
        copy = value.detach().to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(value.device))
        self.add_copy(name, copy, done, step, time_ns)

    def add_copy(self, name: str, copy: torch.Tensor, done: CudaEvent, step: int, time_ns: int) -> None:
        """Record the element of ``copy``, a tensor in host memory, once the event ``done`` has come."""
        self._waiting.append(_PendingScalar(name, copy, done, step, time_ns))
        if len(self._waiting) > MOST_WAITING:
            # A loop that runs far ahead of the GPU would otherwise hold ever more events and copies.
            self._waiting[0].done.synchronize()
        self.poll()

    def poll(self) -> None:
        """Record the numbers that have arrived by now, without waiting."""
        while self._waiting and self._waiting[0].done.query():
            self._record_one(self._waiting.popleft())

    def drain(self) -> None:
        """Wait for the remaining numbers and record them."""
        while self._waiting:
            scalar = self._waiting.popleft()
            scalar.done.synchronize()
            self._record_one(scalar)

    def _record_one(self, scalar: _PendingScalar) -> None:
        self._record(scalar.name, float(scalar.copy.item()), scalar.step, scalar.time_ns)


class TorchDivergenceWatch(DivergenceWatch):
    """Comparison of the ranks' models, made by :func:`watch_divergence`."""

    def __init__(
        self,
        model: torch.nn.Module,
        every: int,
        optimizer: torch.optim.Optimizer | None,
        buffers: bool,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(model, every, buffers, process_set)
        #: torch's versions of two parameters when the last step was counted; ``None`` before the first call.
        self._versions: list[int] | None = None
        if optimizer is None:
            self._hook = model.register_forward_pre_hook(self._before_forward)
        else:
            self._hook = optimizer.register_step_post_hook(self._after_step)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # Changes of the model are counted, not calls: after a step that failed, the ranks may not have made equally many calls.
        versions = [parameter._version for _, parameter in self._ends()]
        if versions == self._versions:
            return
        # The first call finds the model as it was made: no step has changed it yet.
        self.step += self._versions is not None
        self._versions = versions
        self._seen()

    def _ends(self) -> list[tuple[str, torch.Tensor]]:
        """Return the first and the last parameter, whose versions show whether a step has changed the model."""
        found = list(self._model.named_parameters())
        return [found[0], found[-1]] if found else []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.step += 1
        self._seen()

    @untraced
    def _seen(self) -> None:
        if self._every > 1:
            self._samples.append((self.step, self._sample()))
        if self.step % self._every == 0:
            self.check()

    def close(self) -> None:
        """End the comparisons. Idempotent."""
        self._hook.remove()
        super().close()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        if self._buffers:
            yield from self._model.named_buffers()

    @staticmethod
    def _digest(tensor: torch.Tensor, pool: ThreadPoolExecutor | None = None) -> bytes:
        return of_tensor(tensor, pool)

    def _is_equal_on_all_ranks(self, whole: bytes) -> bool:
        mine = torch.frombuffer(bytearray(whole), dtype=torch.uint8).reshape(1, SIZE)
        gathered = allgather(mine, self._name, self._set)
        return bool((gathered == gathered[0]).all())

    @torch.no_grad()
    def _sample(self) -> list[torch.Tensor]:
        """Return a few elements of some tensors, on the tensors' devices: the training does not wait for a GPU."""
        tensors = [t for _, t in self._tensors() if t.numel() and t.layout is torch.strided]
        step = max(1, -(-len(tensors) // MOST_SAMPLED))
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors[::step]:
            row = tensor.detach()[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.detach().reshape(1)
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(row[:ELEMENTS])
        return [torch.cat(rows) for rows in by_kind.values()]


def watch_divergence(
    model: torch.nn.Module,
    every: int = 100,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    buffers: bool = False,
    process_set: ProcessSet = global_process_set,
) -> TorchDivergenceWatch:
    """Raise :class:`DivergenceError` on all ranks when their copies of a model are no longer the same, bit by bit.

    The ranks compare fingerprints of their models after every ``every`` steps, and without ``optimizer`` also before the first
    step. In between each rank remembers a few elements of its model at each step, so that the error can name the step after which
    the models first differed. Calling it again for a model replaces the earlier watch, so a cell may be run twice.

    Args:
        model: Trained alike on all ranks.
        every: After how many steps the models are compared. A comparison reads all parameters once.
        optimizer: The optimizer whose steps are counted. Without it, a step is a change of the model between two of its calls
            in training mode, and the comparison is made at the beginning of the second call.
        buffers: Whether to compare buffers, too. Running statistics of batch normalization differ from rank to rank by nature.
        process_set: The ranks that train together; all by default.

    Returns:
        The watch, which ``close()`` ends; it can be used as a context manager.

    Raises:
        InvalidRequestError: ``model`` is no module, or ``every`` is less than 1.
        AbortedError: Raised by the step after which the models are compared, if a rank fails before it has compared. After a
            failed comparison the model is as the step left it.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequestError(
            f"hvd.watch_divergence() takes a torch.nn.Module, not a {type(model).__name__}."
        )
    if every < 1:
        raise InvalidRequestError(f"every= is a number of steps from 1, not {every}.")
    before: TorchDivergenceWatch | None = vars(model).get(DIVERGENCE_WATCH)
    if before is not None:
        before.close()
    made = TorchDivergenceWatch(model, every, optimizer, buffers, process_set)
    object.__setattr__(model, DIVERGENCE_WATCH, made)
    return made


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_RECORD = "_hvdlab_record"


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
        """Restore the random numbers of that time within this context; afterwards they continue as before."""
        # Without GPUs, whose states were not kept: by default torch would save and restore those of all of
        # them.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield


class TorchRecord(StepRecord):
    """Record of a model's steps, from :func:`record`. It ends with :meth:`close`, or when the model is recorded again.

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
        """Stop recording and forget all records. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().close()
        # A later record of the model stays known, also if this one is closed once more.
        if self._model is not None and vars(self._model).get(_RECORD) is self:
            del vars(self._model)[_RECORD]


def record(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    last: int = 50,
    loss: torch.nn.Module | None = None,
    memory: int = MEMORY,
) -> TorchRecord:
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
    if model is not None and (before := vars(model).get(_RECORD)) is not None:
        before.close()
    made = TorchRecord(model, optimizer, loss, last, memory)
    if model is not None:
        object.__setattr__(model, _RECORD, made)
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
    # A part of a tensor that is not contiguous: reshape() would copy all of it for a few elements.
    some = plain if plain.is_contiguous() or not plain.dim() else plain[..., :4]
    flat = some.reshape(-1)
    # A clone: a view would keep the whole batch in memory, and show values that the program has overwritten
    # since.
    return Input(path, kind, TorchSample(flat[:: max(1, flat.numel() // SAMPLED)].clone(), ends))
