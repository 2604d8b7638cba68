"""``hvd.watch_divergence()``: raises an error when the ranks' models are no longer the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch

from hvdlab.bindings.divergence import DivergenceError, tell_divergence
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.fingerprint import SIZE, fingerprint, threads_for
from hvdlab.torch.compiling import untraced
from hvdlab.torch.fingerprints import of_tensor
from hvdlab.torch.ops import allgather
from hvdlab.torch.process_sets import ProcessSet, global_process_set

MOST_SAMPLED = 32
"""Tensors of which a few elements are remembered at each step, at most."""

ELEMENTS = 8
"""Elements that are remembered of each of them."""
_ATTRIBUTE = "_hvdlab_divergence"
__all__ = ["DivergenceError", "DivergenceWatch", "watch_divergence"]


class DivergenceWatch:
    """What :func:`watch_divergence` returns. The comparisons end with :meth:`close`, or when the model is watched anew.

    Attributes:
        step: Steps that were seen.
        checks: How often the whole models were compared.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int,
        optimizer: torch.optim.Optimizer | None,
        buffers: bool,
        process_set: ProcessSet,
    ) -> None:
        self.step = self.checks = 0
        self._model, self._every, self._buffers, self._set = model, every, buffers, process_set
        self._name = f"divergence.{type(model).__name__}"
        self._samples: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=every)
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
        self.step += self._versions is not None
        self._versions = versions
        self._seen()

    def _ends(self) -> list[tuple[str, torch.Tensor]]:
        """The first and the last parameter, whose versions tell whether a step has changed the model."""
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

    def check(self) -> None:
        """Compare the models now. All ranks must call it.

        Raises:
            DivergenceError: The models differ; on all ranks. Nothing is changed.
            CollectiveError: Not all ranks called it.
        """
        names, digests = self._digests()
        whole = fingerprint(*(name.encode() for name in names), *digests)
        gathered = allgather(
            torch.frombuffer(bytearray(whole), dtype=torch.uint8).reshape(1, SIZE), self._name, self._set
        )
        self.checks += 1
        if not bool((gathered == gathered[0]).all()):
            self._raise(names, digests)
        self._samples.clear()

    def close(self) -> None:
        """End the comparisons. Idempotent."""
        self._hook.remove()
        self._samples.clear()
        vars(self._model).pop(_ATTRIBUTE, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<DivergenceWatch of {type(self._model).__name__}, {self.step} steps, {self.checks} comparisons>"
        )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        if self._buffers:
            yield from self._model.named_buffers()

    def _digests(self) -> tuple[list[str], list[bytes]]:
        names, digests = [], []
        with ThreadPoolExecutor(threads_for(context.engine().local_size), "hvdlab-fingerprints") as pool:
            for name, tensor in self._tensors():
                names.append(name)
                digests.append(of_tensor(tensor, pool))
        return names, digests

    @torch.no_grad()
    def _sample(self) -> list[torch.Tensor]:
        """A few elements of some tensors, on the tensors' devices: the training does not wait for a GPU."""
        tensors = [t for _, t in self._tensors() if t.numel() and t.layout is torch.strided]
        step = max(1, -(-len(tensors) // MOST_SAMPLED))
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors[::step]:
            row = tensor.detach()[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.detach().reshape(1)
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(row[:ELEMENTS])
        return [torch.cat(rows) for rows in by_kind.values()]

    def _raise(self, names: Sequence[str], digests: Sequence[bytes]) -> None:
        samples = [(step, fingerprint(*map(of_tensor, rows))) for step, rows in self._samples]
        self._samples.clear()
        tell_divergence(self._name, self._set, self.step, dict(zip(names, digests, strict=True)), samples)


def watch_divergence(
    model: torch.nn.Module,
    every: int = 100,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    buffers: bool = False,
    process_set: ProcessSet = global_process_set,
) -> DivergenceWatch:
    """Raise :class:`DivergenceError` on all ranks when their copies of a model are no longer the same, bit by bit.

    The ranks compare fingerprints of their models after every ``every`` steps, and without ``optimizer`` also before the first
    step. In between each rank remembers a few elements of its model at each step, so that the error can name the step after which
    the models first differed. Calling it again for a model replaces the earlier watch, so a cell may be run twice.

    Args:
        model: Trained alike on all ranks.
        every: After how many steps the models are compared. A comparison reads all parameters once.
        optimizer: The optimizer whose steps are counted. Without it, a step is what changes the model between two of its calls
            in training mode, and the comparison is made at the beginning of the second call.
        buffers: Whether to compare buffers, too. Running statistics of batch normalization differ from rank to rank by nature.
        process_set: The ranks that train together; all by default.

    Returns:
        The watch, which ``close()`` ends; it can be used as a context manager.

    Raises:
        InvalidRequestError: ``model`` is no module, or ``every`` is less than 1.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequestError(
            f"hvd.watch_divergence() takes a torch.nn.Module, not a {type(model).__name__}."
        )
    if every < 1:
        raise InvalidRequestError(f"every= is a number of steps from 1, not {every}.")
    before: DivergenceWatch | None = vars(model).get(_ATTRIBUTE)
    if before is not None:
        before.close()
    made = DivergenceWatch(model, every, optimizer, buffers, process_set)
    object.__setattr__(model, _ATTRIBUTE, made)
    return made
