"""``agree(model, optimizer)``: after a step that failed, ranks that are behind get the values of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvdlab.bindings.fingerprints import fingerprint
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.text import format_ranks, visible
from hvdlab.torch.fingerprints import of_tensor
from hvdlab.torch.functions import transfer_optimizer_state

_OPTIMIZER = "optimizer: "


@dataclass(frozen=True)
class Agreement:
    """Outcome of :func:`agree`; the same on all ranks.

    Attributes:
        sources: For each rank of the group that got values, the rank that they came from.
        tensors: Names of the differing values: parameters, buffers, and ``optimizer: 0.weight.exp_avg``.
        steps: Steps that each rank's optimizer had taken, by rank; ``None`` where it does not count them.
    """

    sources: Mapping[int, int]
    tensors: tuple[str, ...]
    steps: tuple[int | None, ...]

    def __repr__(self) -> str:
        if not self.sources:
            return "the ranks agree"
        several = len(self.tensors) - 1
        what = f"`{visible(self.tensors[0])}`" + (f" and {several} more" if several else "")
        sentences = [self._sentence(source) for source in sorted(set(self.sources.values()))]
        return f"the ranks differed in {what}: {'; '.join(sentences)}"

    def _sentence(self, source: int) -> str:
        ranks = [rank for rank, other in self.sources.items() if other == source]
        behind = {rank: self._behind(rank, source) for rank in ranks}
        lag = ", ".join(
            f"{format_ranks([rank for rank in ranks if behind[rank] == count])} "
            f"{'was' if list(behind.values()).count(count) == 1 else 'were'} {count} step{'s' * (count > 1)} behind"
            for count in sorted(set(behind.values()) - {0})
        )
        has = f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} the values of rank {source} now"
        return f"{lag}; {has}" if lag else has

    def _behind(self, rank: int, source: int) -> int:
        own, other = self.steps[rank], self.steps[source]
        return 0 if own is None or other is None else other - own


@dataclass(frozen=True)
class _ReplicaDigest:
    """Digest of a rank's replica: its model and optimizer, as the other ranks compare them.

    Attributes:
        place: Which shard of each parameter and buffer the rank has: ranks with the same place should have the same values.
        parameters: Names of the parameters and buffers, in order.
        digests: Fingerprint of each of them, and of each part of the optimizer's state.
        steps: The largest ``step`` in the optimizer's state, 0 if there is none; ``None`` if there is no optimizer.
    """

    place: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]
    digests: Mapping[str, bytes]
    steps: int | None

    def whole(self) -> bytes:
        """Return one fingerprint of all parameters, buffers and optimizer state."""
        return fingerprint(
            *(part for name, digest in sorted(self.digests.items()) for part in (name.encode(), digest))
        )


def agree(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    buffers: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Agreement:
    """Make the ranks' copies of a model, and of its optimizer's state, equal again, bit by bit.

    Call it on all ranks of the group after a step has failed: some ranks may have taken the step and others not. The ranks
    compare fingerprints. Where these differ, ranks get the values of a rank that has taken the most steps, as the optimizer counts
    them (``state["step"]`` of Adam and most others). Among several such ranks, and among all ranks if the optimizer does not
    count, the values that most of them have are chosen; between equally frequent values those of the lowest rank. Gradients
    are dropped on all ranks, since those of a failed step are partly reduced.

    Works for models wrapped in ``DistributedDataParallel``, for those of ``fully_shard`` and for other
    ``DTensor`` parameters. A shard is compared only with its replicas on other ranks, and can be copied only from them.

    Args:
        model: A model with the same parameters on all ranks, wrapped or not.
        optimizer: Its optimizer, whose state is compared and copied, too; ``None`` for the model only.
        buffers: Whether to compare and copy buffers, too. Running statistics of batch normalization differ from rank to rank by
            nature.
        group: The ranks that train together; by default all.

    Returns:
        The differences and the copies. A notebook shows it as a sentence.

    Raises:
        InvalidRequestError: The models have different parameters, or a rank that is behind has shards that no rank ahead has.
            Then parameters and state are unchanged: load the last checkpoint on all ranks.
        CollectiveError: Not all ranks called it, or one failed meanwhile. Ranks that were behind may have got a part of the
            values: call it again.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequestError(f"agree() takes a torch.nn.Module, not a {type(model).__name__}.")
    if dist.get_rank(group) < 0:
        raise InvalidRequestError(
            "agree() is called by the ranks of its group, to which this one does not belong."
        )
    model.zero_grad(set_to_none=True)
    # Before the fingerprints: parameters that fully_shard has gathered are not the shards that the ranks
    # compare.
    _reset_wrappers(model)
    replicas: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(replicas, _digest_of(model, optimizer, buffers), group)
    agreement = choose_sources(replicas)
    if agreement.sources:
        _bring(model, optimizer, buffers, agreement, group)
    return agreement


def choose_sources(replicas: Sequence[_ReplicaDigest]) -> Agreement:
    """Choose which rank gets the values of which other rank, from the digests of all ranks' replicas, by rank.

    A function of these alone, so that every rank comes to the same result.

    Raises:
        InvalidRequestError: The ranks can't be made to agree: they have different parameters, or no rank that is ahead has the
            shards of a rank that is behind.
    """
    for rank, replica in enumerate(replicas):
        if odd := set(replica.parameters) ^ set(replicas[0].parameters):
            name = visible(min(odd))
            has, lacks = (rank, 0) if name in replica.parameters else (0, rank)
            raise InvalidRequestError(
                f"agree() is for models that are alike: rank {has} has a parameter `{name}`, and rank {lacks} has not."
            )
    steps = tuple(replica.steps for replica in replicas)
    most = max((count for count in steps if count is not None), default=None)
    ahead = [rank for rank, count in enumerate(steps) if count == most]
    sources: dict[int, int] = {}
    for place in dict.fromkeys(replica.place for replica in replicas):
        ranks = [rank for rank, replica in enumerate(replicas) if replica.place == place]
        wholes = {rank: replicas[rank].whole() for rank in ranks}
        if not (chosen := [rank for rank in ranks if rank in ahead]):
            raise InvalidRequestError(
                f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at step {steps[ranks[0]]} and "
                f"{format_ranks(ahead)} at step {most}, and no rank that is ahead has the shards of "
                f"{'this one' if len(ranks) == 1 else 'these'}: load the last checkpoint on all ranks."
            )
        votes = Counter(wholes[rank] for rank in chosen)
        source = max(chosen, key=lambda rank: (votes[wholes[rank]], -rank))
        sources |= {rank: source for rank in ranks if wholes[rank] != wholes[source]}
    names = dict.fromkeys(
        name
        for rank, source in sources.items()
        for name in (*replicas[source].digests, *replicas[rank].digests)
        if replicas[rank].digests.get(name) != replicas[source].digests.get(name)
    )
    return Agreement(sources, tuple(names), steps)


def _reset_wrappers(model: torch.nn.Module) -> None:
    """Reset the wrappers around the model after a pass that failed in its middle on some ranks."""
    from torch.distributed.fsdp import FSDPModule

    within: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            _make_reducer(module)
        elif isinstance(module, FSDPModule) and module not in within:
            within.update(module.modules())
            _reshard(module)


def _make_reducer(wrapper: Any) -> None:
    """Give a ``DistributedDataParallel`` a new reducer, as when the model was wrapped.

    After a failed pass the old reducer may still wait for gradients, and its buckets may differ from those of other ranks: DDP
    orders the buckets again in its second pass, and a rank that was stopped there still has the old ones. The next pass would
    then add up gradients of different parameters.
    """
    wrapper.reducer._remove_autograd_hooks()
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if wrapper.mixed_precision is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(wrapper.mixed_precision.param_dtype)
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]


def _reshard(root: Any) -> None:
    """Let ``fully_shard`` turn its parameters into shards again, and forget how far the pass had come."""
    if not hasattr(root, "reset_iter_state"):  # before torch 2.13
        root.reshard()
        return
    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # nothing was computed yet
    for each in state._state_ctx.all_states:
        for parameters in each._fsdp_param_groups:
            # Drop the parameters that were gathered ahead: torch would wait for this all-gather, and raise its error.
            parameters._all_gather_result = None
    root.reset_iter_state()


def _tensors(model: torch.nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    if buffers:
        yield from model.named_buffers()


def _digest_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, buffers: bool
) -> _ReplicaDigest:
    named = dict(_tensors(model, buffers))
    digests = {name: of_tensor(_local(tensor)) for name, tensor in named.items()}
    steps: list[int] = []
    if optimizer is not None:
        names = {tensor: name for name, tensor in named.items()}
        for number, parameter in enumerate(p for each in optimizer.param_groups for p in each["params"]):
            label = names.get(parameter, f"parameter {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                plain = of_tensor(_local(value)) if isinstance(value, torch.Tensor) else repr(value).encode()
                digests[f"{_OPTIMIZER}{label}.{key}"] = fingerprint(plain)
                if key == "step":
                    steps.append(int(value))
    place = tuple(_place(tensor) for tensor in named.values())
    return _ReplicaDigest(place, tuple(named), digests, max(steps, default=None if optimizer is None else 0))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor``; any other tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return which shard of a ``DTensor`` this rank has. Ranks with different shards have different values by nature."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    placements: Any = getattr(tensor, "placements", ())
    return tuple(
        coordinate
        for coordinate, placement in zip(mesh.get_coordinate(), placements, strict=True)
        if not placement.is_replicate()
    )


class _Transfer:
    """Transfer of values between ranks: by broadcasts if one rank's values go to all others, otherwise by messages.

    Args:
        agreement: Which rank gets the values of which other rank.
        group: The ranks that take part; ``None`` for all.
    """

    def __init__(self, agreement: Agreement, group: dist.ProcessGroup | None) -> None:
        self._group, rank = group, dist.get_rank(group)
        size, sources = dist.get_world_size(group), agreement.sources
        # A source gets no values itself. So if all ranks but one get some, they get them from that one.
        several = len(sources) == size - 1 > 1
        #: The rank whose values all others get, as a rank of the world; ``None`` if only some ranks get values.
        self._root = self._global(next(iter(sources.values()))) if several else None
        #: The rank whose values this rank gets, and the ranks that get this rank's, as ranks of the world.
        self._from = self._global(sources[rank]) if rank in sources else None
        self._to = [self._global(other) for other, source in sources.items() if source == rank]
        #: Whether this rank's values go to another rank, and whether this rank gets another one's.
        self.gives, self.gets = bool(self._to), rank in sources

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def plan(self, plan: Any) -> Any:
        """Return the source's ``plan``; a rank that gets values passes ``None``."""
        box = [plan]
        if self._root is not None:
            dist.broadcast_object_list(box, self._root, self._group)
        elif self._from is not None:
            dist.recv_object_list(box, self._from, self._group)
        for other in self._to if self._root is None else ():
            dist.send_object_list(box, other, self._group)
        return box[0]

    @torch.no_grad()
    def tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors (of ``DTensor``, this rank's shards) with those of the source. The source's are not changed."""
        local = [_local(tensor).detach() for tensor in tensors]
        works: list[Any] = []
        for tensor in local:
            if self._root is not None:
                works.append(dist.broadcast(tensor, self._root, self._group, async_op=True))
            elif self._from is not None:
                works.append(dist.irecv(tensor, self._from, self._group))
            for other in self._to if self._root is None else ():
                works.append(dist.isend(tensor, other, self._group))
        for work in works:
            work.wait()


def _bring(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    buffers: bool,
    agreement: Agreement,
    group: dist.ProcessGroup | None,
) -> None:
    transfer = _Transfer(agreement, group)
    if not (transfer.gives or transfer.gets):
        return
    transfer.tensors([tensor for _, tensor in _tensors(model, buffers)])
    if optimizer is not None:
        transfer_optimizer_state(optimizer, transfer, gives=transfer.gives)
