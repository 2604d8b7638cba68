"""Batch normalization with the mean and variance over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdlab.bindings.operations import Operation
from hvdlab.collectives.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.collectives.types import SUM, OpKind
from hvdlab.torch.autograd import collective
from hvdlab.torch.dynamo import untraced

_HALVES = (torch.float16, torch.bfloat16)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over ``(N, C, ...)`` whose statistics in training are those of all ranks' batches.

    Output and gradients are those of ``torch.nn.BatchNorm*d`` on the concatenation of the ranks' batches, whose sizes
    (and extents beyond the channels) may differ. The gradients of weight and bias are this rank's share; the shares of all
    ranks add up to the gradient of the whole, so ``DistributedOptimizer`` trains as one process would. In evaluation, and with
    one rank, torch's own batch normalization runs.

    In training, every rank of the process set must run the forward and the backward pass. float16 and bfloat16 are computed in
    float32. Differentiable twice.

    Args:
        num_features: Channels, dimension 1 of the input.
        eps: Added to the variance.
        momentum: Weight of a batch's statistics in the running ones; ``None`` for a cumulative average.
        affine: Whether there are a weight and a bias to learn.
        track_running_stats: Whether to keep running statistics, which evaluation uses.
        process_set: The ranks whose batches count together; a rank outside normalizes its own.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm takes at least two dimensions, (N, C, ...); these are {input.dim()}."
            )
        if input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm of {self.num_features} channels was given {input.shape[1]}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch of shape ``(N, C, ...)``; returns a tensor of its shape and dtype.

        Raises:
            ValueError: The batch has fewer than two dimensions or another number of channels; or, in training, there is a single
                value for each channel on all ranks together; or the process set is not registered.
            MismatchError, AbortedError: As for ``hvd.allgather``; running statistics are untouched then.
        """
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        included = self.process_set.included()
        if included is None:
            set_id(self.process_set)  # raises: the set is not registered, and each rank would normalize alone
        if not included or self.process_set.size() == 1:
            return super().forward(input)
        return self._forward_together(input)

    @untraced
    def _forward_together(self, input: torch.Tensor) -> torch.Tensor:
        output, mean, variance, count = _SyncBatchNorm.apply(  # type: ignore[no-untyped-call]  # torch has no type for it
            input, self.weight, self.bias, self.eps, set_id(self.process_set)
        )
        self._note(mean, variance, int(count))
        result: torch.Tensor = output
        return result

    @torch.no_grad()
    def _note(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """Update the running statistics with those of a batch of ``count`` values for each channel."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


class _SyncBatchNorm(torch.autograd.Function):
    """The normalized batch, and the mean, the biased variance and the number of values of each channel."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x = _wide(input)
        mean, variance, count = _statistics(x, process_set)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        output = torch.addcmul(_broad(shift, x).to(x.dtype), x, _broad(scale, x).to(x.dtype)).to(input.dtype)
        ctx.save_for_backward(input, weight, bias, mean.to(x.dtype), inverse.to(x.dtype))
        ctx.eps, ctx.process_set, ctx.count = eps, process_set, count
        counted = torch.tensor(count)
        ctx.mark_non_differentiable(mean, variance, counted)
        return output, mean, variance, counted

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        input, weight, bias, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # the user differentiates this gradient once more
            return *_differentiable_gradients(ctx, gradient, input, weight, bias), None, None
        x, dy = _wide(input), _wide(gradient)
        normalized = (x - _broad(mean, x)) * _broad(inverse, x)
        dims = _all_but_channels(x)
        of_bias, of_weight = dy.sum(dims), (dy * normalized).sum(dims)
        of_input = None
        if ctx.needs_input_grad[0]:
            means = _summed(torch.stack([of_bias, of_weight]), ctx.process_set) / ctx.count
            scale = inverse if weight is None else inverse * weight
            of_input = dy - _broad(means[0], x)
            of_input -= normalized.mul_(_broad(means[1], x))
            of_input = of_input.mul_(_broad(scale, x)).to(input.dtype)
        return (
            of_input,
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
            None,
        )


def _statistics(x: torch.Tensor, process_set: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and biased variance (float64) of each channel over all ranks, and the number of values that they are of."""
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    mine = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    # A rank with an empty batch takes part with a count of 0. The mean of nothing is NaN, which times 0 would
    # still be NaN on all ranks.
    if count:
        variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
        mine[0], mine[1 : 1 + channels], mine[1 + channels :] = count, mean, variance
    everyones = collective(Operation(OpKind.ALLGATHER, process_set=process_set), mine[None], None)
    counts, means, variances = torch.split(everyones, [1, channels, channels], 1)
    total = counts.sum()
    # After the collective, so that all ranks raise it, and none waits for one that has.
    if total <= 1:
        raise ValueError(
            "SyncBatchNorm needs more than one value per channel, on all ranks together, when it trains."
        )
    mean = (counts * means).sum(0) / total
    # From squares of differences between the means, since the difference E[x^2] - E[x]^2 would cancel almost all digits.
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return mean, variance, int(total)


def _differentiable_gradients(
    ctx: Any,
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Return the gradients, by autograd through the same formula written with differentiable collectives."""
    x = _wide(input)
    dims = _all_but_channels(x)
    mean = _summed(x.sum(dims), ctx.process_set) / ctx.count
    centred = x - _broad(mean, x)
    variance = _summed((centred * centred).sum(dims), ctx.process_set) / ctx.count
    output = _affine(centred * _broad(torch.rsqrt(variance + ctx.eps), x), weight, bias).to(input.dtype)
    tensors = (input, weight, bias)
    wanted = [t for t, needed in zip(tensors, ctx.needs_input_grad, strict=False) if needed and t is not None]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


def _affine(normalized: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``weight * normalized + bias`` by channel."""
    if weight is not None:
        normalized = normalized * _broad(weight, normalized)
    return normalized if bias is None else normalized + _broad(bias, normalized)


def _summed(tensor: torch.Tensor, process_set: int) -> torch.Tensor:
    operation = Operation(OpKind.ALLREDUCE, SUM, process_set=process_set)
    return collective(operation, tensor, None)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _broad(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one number for each channel, to be combined with ``(N, C, ...)``."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
