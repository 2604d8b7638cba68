"""The process group: torch's collectives as requests of the core.

The core reads and writes contiguous tensors of the host where they are. It does so with those of GPUs in :meth:`~HvdlabProcessGroup.allreduce`, ``broadcast``,
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` if the group has a data plane for them. It works on copies of all others, and moves dtypes
that it does not know as bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist

from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.errors import (
    Disagreement,
    InvalidRequestError,
    MismatchError,
    UnsupportedError,
)
from hvdlab.collectives.planes.base import HOST
from hvdlab.collectives.reduce import needs_width
from hvdlab.collectives.types import PLAIN, OpKind, ReduceOp, Reduction, check_supported
from hvdlab.torch.adapter import ADAPTER, CUDA_TENSORS, DTYPES
from hvdlab.torch.c10d.call_forms import FORMS, in_all_forms
from hvdlab.torch.c10d.reconfiguration import TorchReconfiguration, handle_of, require_same_ranks
from hvdlab.torch.c10d.submission import Calls, Messages, Submission
from hvdlab.torch.c10d.tensors import (
    Copy,
    array_of,
    core_dtype,
    listed,
    memory_of,
    parts_of_root,
    plain_of,
    real_parts,
    require_dense,
    require_exchange,
    require_member,
    require_outputs,
    resolved,
    scatter_into,
    share_memory,
    single,
    split_rows,
    writable,
    writable_array,
)
from hvdlab.torch.c10d.work import CoalescedWork, HvdlabWork
from hvdlab.torch.c10d.world import C10dWorld
from hvdlab.torch.dynamo import untraced_methods

_Backend: Any = getattr(dist, "_Backend")  # noqa: B009  (torch exports no other name of the class)
_Types: Any = dist.ReduceOp.RedOpType
_OPERATORS = (
    (_Types.SUM, "SUM", ReduceOp.SUM),
    (_Types.AVG, "AVG", ReduceOp.AVERAGE),
    (_Types.MIN, "MIN", ReduceOp.MIN),
    (_Types.MAX, "MAX", ReduceOp.MAX),
    (_Types.PRODUCT, "PRODUCT", ReduceOp.PRODUCT),
    (_Types.PREMUL_SUM, "PREMUL_SUM", ReduceOp.SUM),
)
_BITWISE: tuple[tuple[Any, str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    (_Types.BAND, "BAND", torch.bitwise_and),
    (_Types.BOR, "BOR", torch.bitwise_or),
    (_Types.BXOR, "BXOR", torch.bitwise_xor),
)
_OF_BOOL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
"""The sum of truth values is *any* and their product *all*, as with NCCL."""
_LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE)
_T = TypeVar("_T")


# Torch declares each method with overloads for its C++ callers and its Python callers, which one override can't match.
_ProcessGroup: Any = dist.ProcessGroup


@untraced_methods
class HvdlabProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group on hvdlab's core. Made by ``dist.init_process_group("hvdlab")`` and ``dist.new_group``.

    A failure raises one of hvdlab's errors on all ranks, and the group can be used afterwards. ``abort`` gives up all operations
    in flight, and does not end the group.

    Args:
        world: The world in which the group is.
        rank: This rank's number in the group.
        size: Number of ranks.
        name: Torch's name of the group.
        members: The ranks of the world that are in it, by their numbers in the group.
        timeout: Limit of each wait that gives none.
    """

    def __init__(
        self, world: C10dWorld, rank: int, size: int, name: str, members: Sequence[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._calls = Calls(world, name, members, timeout.total_seconds())
        self._engine, self._members = world.engine, self._calls.members
        #: The members' numbers in the group in the order of the core; empty if the orders are equal. The core sorts members by rank, or has
        #: those first that were first in the world.
        self._order = [
            self._members.index(rank)
            for rank in self._engine.ranks(self._calls.process_set)
            if rank in self._members
        ]
        if self._order == list(range(size)):
            self._order = []
        self._messages = Messages(self._calls, rank)
        world.add(self._calls)

    # -- torch's interface of a group ---------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "hvdlab"

    def name(self) -> str:
        return "hvdlab"

    def getGroupName(self) -> str:
        return self._calls.name

    def setGroupName(self, name: str) -> None:
        self._calls.rename(name=name)

    def getGroupDesc(self) -> str:
        return self._calls.description

    def setGroupDesc(self, description: str) -> None:
        self._calls.rename(description=description)

    # Torch's Python layer calls these.
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HvdlabProcessGroup:
        """Return the group itself, which is its only backend, for tensors of all devices."""
        return self

    @property
    def supports_splitting(self) -> bool:
        """Return whether torch may split the group, as it asks each backend where a device is bound to the default group: never."""
        return False

    @property
    def options(self) -> Any:
        """Return a backend's options, as torch and libraries read them: its name and timeout. A change of them has no effect."""
        found = _Backend.Options("hvdlab", timedelta(seconds=self._calls.seconds))
        found.global_ranks_in_group, found.group_name = (
            self._calls.world.numbers(self._members),
            self._calls.name,
        )
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._calls.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.sequence

    def abort(self) -> None:
        """Give up the operations in flight, on all ranks; the group stays usable."""
        self._engine.withdraw(f"rank {self._engine.rank} called abort()", self._calls.process_set)

    def shutdown(self) -> None:
        """Refuse further operations. The process set stays, for later groups of the same ranks."""
        self._calls.close()

    def has_its_ranks(self) -> bool:
        """Return whether the processes that made the group are still its ranks: ``False`` once one was lost, or replaced."""
        return self._calls.has_its_ranks()

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether torch's interface for repair works here: always, since hvdlab's groups repair themselves."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return this rank's handle, as torch's interface for repair needs those of all ranks."""
        return handle_of(self._calls.name_in_core, self.rank())

    def reconfigure(self, opts: TorchReconfiguration) -> HvdlabWork:
        """Meet all ranks of the group, which go on with it. Returns a work that ends when all have come.

        Raises:
            InvalidRequestError: The handles are not those of the group's ranks, or the group has lost ranks.
        """
        require_same_ranks(self._calls.name_in_core, self.size(), opts)
        self._calls.require_usable("reconfigure")
        return self.barrier()

    def split_group(self, ranks: Sequence[int], *options: object, **named: object) -> HvdlabProcessGroup:
        """Refuse to split the group: torch's own method reads a store that the group lacks, which ends the process.

        Raises:
            UnsupportedError: Always; ``dist.new_group`` makes a group of some of the ranks.
        """
        raise UnsupportedError(
            f"split_group: groups of hvdlab's can't be split; call dist.new_group({list(ranks)}) on all ranks."
        )

    splitGroup = split_group

    def _start_coalescing(self, device: object = None) -> None:
        """Gather this thread's operations from now on, until :meth:`_end_coalescing`. Torch's ``_coalescing_manager`` calls both."""
        self._calls.start_coalescing()

    def _end_coalescing(self, device: object = None) -> CoalescedWork:
        """Stop gathering; returns the operations since :meth:`_start_coalescing` as one work."""
        return self._calls.end_coalescing()

    def _root(self, operation: str, opts: Any) -> int:
        """Return the root's number in the group, which torch passes in an object of options, or as a number."""
        root = 0 if opts is None else int(getattr(opts, "rootRank", opts))
        require_member(operation, getattr(opts, "rootTensor", 0), 1, "root tensor")
        return require_member(operation, root, self.size(), "root rank")

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> HvdlabWork:
        return self.allreduce_coalesced([single("all_reduce", tensors)], opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> HvdlabWork:
        given = listed(tensors)
        operator = _operator(opts)
        submission = Submission()
        for tensor in given:
            if tensor.layout is torch.sparse_coo:
                self._add_sparse(submission, tensor, operator)
            else:
                self._add_allreduce(submission, tensor, operator)
        return self._calls.submit("all_reduce", given, submission, opts=opts)

    def reduce(self, tensors: Any, opts: Any) -> HvdlabWork:
        tensor, submission, operator = single("reduce", tensors), Submission(), _operator(opts)
        is_root = self._root("reduce", opts) == self.rank()
        # The core reduces on all ranks; on all but the root into a copy, since only the root's tensor may change.
        self._add_allreduce(submission, tensor if is_root else tensor.detach().clone(), operator)
        return self._calls.submit("reduce", [tensor], submission, opts=opts)

    def _add_allreduce(self, submission: Submission, tensor: torch.Tensor, operator: Any) -> None:
        require_dense(tensor, "all_reduce")
        for number, name, fold in _BITWISE:
            if operator == number:
                self._add_folded(submission, tensor, name, fold)
                return
        request = Request(OpKind.ALLREDUCE, dtype=ADAPTER.dtype(tensor.real))
        _set_operator(request, operator, tensor)
        request.device = self._device(request, tensor)
        request.input, copy = writable(tensor, request.device, reducing=True)
        request.output = request.input
        submission.add(request, copy)

    def _add_sparse(self, submission: Submission, tensor: torch.Tensor, operator: Any) -> None:
        """Gather all indices and values, and add up values with the same index. The result is coalesced."""
        if not any(operator == one for one in (_Types.SUM, _Types.AVG)):
            raise UnsupportedError("all_reduce of sparse tensors only works with ReduceOp.SUM and AVG.")
        own = tensor.detach().cpu().coalesce()
        # The coordinator compares neither indices nor values, whose numbers differ, so the ranks compare the
        # shapes themselves.
        shape = torch.tensor([own.shape])
        parts = (own.indices().t().contiguous(), own.values().contiguous())
        gathered = torch.empty((self.size(), shape.numel()), dtype=shape.dtype)
        submission.add(
            Request(
                OpKind.ALLGATHER, input=array_of(shape), output=array_of(gathered), dtype=core_dtype(shape)
            )
        )
        landings = [self._add_rows(submission, real_parts(part)) for part in parts]

        def copy(result: Result) -> None:
            if not bool((gathered == shape).all()):
                raise _other_shapes(gathered.tolist())
            (indices,), (values,) = landings
            if tensor.is_complex():
                values = torch.view_as_complex(values)
            total = torch.sparse_coo_tensor(
                indices.t(), values, tensor.shape, check_invariants=True
            ).coalesce()
            tensor.copy_(total / self.size() if operator == _Types.AVG else total)

        submission.copies[-1] = copy

    @staticmethod
    def _add_rows(submission: Submission, part: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor of which each rank can have any number of rows; the returned list gets the result once it has arrived."""
        landing: list[torch.Tensor] = []

        def allocate(shape: tuple[int, ...]) -> npt.NDArray[Any]:
            landing.append(torch.empty(shape, dtype=part.dtype))
            return ADAPTER.host_view(landing[0])

        request = Request(OpKind.ALLGATHER, input=array_of(part), dtype=ADAPTER.dtype(part))
        request.allocate = allocate
        submission.add(request)
        return landing

    def _add_folded(
        self,
        submission: Submission,
        tensor: torch.Tensor,
        name: str,
        fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Reduce by a bitwise operator, which no data plane has: gather all tensors and combine them on each rank."""
        if tensor.is_floating_point() or tensor.is_complex():
            raise UnsupportedError(
                f"Cannot use ReduceOp.{name} with non-integral dtype {tensor.dtype}: it takes integers and bool."
            )
        own = tensor.detach().contiguous().reshape(1, -1)
        gathered = torch.empty((self.size(), tensor.numel()), dtype=tensor.dtype)
        request = Request(
            OpKind.ALLGATHER, input=array_of(own), output=array_of(gathered), dtype=core_dtype(own)
        )

        def copy(result: Result) -> None:
            tensor.detach().copy_(functools.reduce(fold, list(gathered)).view(tensor.shape))

        submission.add(request, copy)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HvdlabWork:
        operator = _operator(opts)
        submission = Submission()
        for output, given in zip(outputs, inputs, strict=True):
            self._add_reduce_scatter(submission, output, given, operator)
        return self._calls.submit("reduce_scatter", list(outputs), submission, opts=opts, inputs=inputs)

    def _add_reduce_scatter(
        self, submission: Submission, output: torch.Tensor, given: torch.Tensor, operator: Any
    ) -> None:
        require_dense(given, "reduce_scatter")
        size = self.size()
        if given.numel() != output.numel() * size or given.dtype != output.dtype:
            raise InvalidRequestError(
                f"reduce_scatter: the input ({given.dtype}, {given.numel()} elements) must have {size} times the elements of "
                f"the output ({output.dtype}, {output.numel()} elements)."
            )
        if any(operator == number for number, _, _ in _BITWISE):
            # A clone, since the allreduce writes all of it, and the user's input must not change.
            whole = given.detach().clone().contiguous()
            self._add_allreduce(submission, whole, operator)
            self._then_copy(submission, lambda: whole.reshape(size, -1)[self.rank()], output)
            return
        request = Request(OpKind.REDUCESCATTER, dtype=ADAPTER.dtype(given.real))
        _set_operator(request, operator, given)
        device = request.device = self._device(request, given, output)
        # torch can't compute the extent -1 of a tensor without elements.
        source = plain_of(real_parts(given, device), device).reshape(
            (size, -1) if given.numel() else (size, 0)
        )
        if self._order:
            source = source[self._order]
        elif share_memory(source, output):
            # The planes write the output while they still read other ranks' rows of the input.
            source = source.clone()
        request.input = memory_of(source, device)
        row = (1, -1) if given.numel() else (1, 0)
        request.output, copy = writable(output, device, reducing=True, shape=row)
        submission.add(request, copy)

    def _device(self, request: Request, *tensors: torch.Tensor) -> str:
        """Return the device class in whose memory a request is executed: its tensors' class if the group has a data plane that can do it, otherwise the host's."""
        device = CUDA_TENSORS.device(tensors[0])
        if device == HOST or any(tensor.device != tensors[0].device for tensor in tensors[1:]):
            return HOST
        if not self._engine.device_plane(self._calls.process_set, device):
            return HOST
        wide = request.kind in (OpKind.ALLREDUCE, OpKind.REDUCESCATTER) and needs_width(
            request.dtype, request.reduction
        )
        return HOST if wide else device

    @staticmethod
    def _then_copy(submission: Submission, part: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        """Copy a part of the result to ``output`` when the last request is done and its own copy is made."""
        before = submission.copies[-1]

        def copy(result: Result) -> None:
            if before is not None:
                before(result)
            output.detach().copy_(part().reshape(output.shape))

        submission.copies[-1] = copy

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> HvdlabWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter(self, outputs: Any, lists: Any, opts: Any = None) -> HvdlabWork:
        operator = _operator(opts)
        submission = Submission()
        for output, parts in zip(listed(outputs), lists, strict=True):
            counts = [part.numel() for part in parts]
            if len(counts) != self.size() or counts[self.rank()] != output.numel():
                raise InvalidRequestError(
                    f"reduce_scatter: the list needs one tensor for each of the {self.size()} ranks, and this rank's must have "
                    f"the {output.numel()} elements of the output; they have {counts}."
                )
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            if len(set(counts)) == 1:
                self._add_reduce_scatter(submission, output, flat, operator)
            else:  # the core's reducescatter splits evenly, so reduce everything and keep this rank's part
                start = sum(counts[: self.rank()])
                self._add_allreduce(submission, flat, operator)
                part = flat[start : start + output.numel()]
                self._then_copy(submission, lambda part=part: part, output)  # type: ignore[misc]
        return self._calls.submit("reduce_scatter", list(outputs), submission, opts=opts, inputs=lists)

    # -- operations that only move data -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> HvdlabWork:
        tensor, submission = single("broadcast", tensors), Submission()
        root = self._members[self._root("broadcast", opts)]
        require_dense(tensor, "broadcast")
        request = Request(OpKind.BROADCAST, dtype=core_dtype(tensor), root=root)
        request.device = self._device(request, tensor)
        request.input, copy = writable(tensor, request.device)
        request.output = request.input
        submission.add(request, None if root == self._engine.rank else copy)
        return self._calls.submit("broadcast", [tensor], submission, opts=opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HvdlabWork:
        submission = Submission()
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self.size() or output.dtype != given.dtype:
                raise InvalidRequestError(
                    f"all_gather: the output ({output.dtype}, {output.numel()} elements) must have {self.size()} times the "
                    f"elements of the input ({given.dtype}, {given.numel()} elements)."
                )
            if self._order and output.numel():
                rows = torch.empty(self.size(), given.numel(), dtype=given.dtype)
                copy: Copy | None = functools.partial(self._copy_rows, rows, output)
                self._add_all_gather(submission, given, array_of(rows), copy)
                continue
            if output.numel():
                request = Request(OpKind.ALLGATHER, dtype=core_dtype(given))
                request.device = self._device(request, given, output)
                if request.device != HOST:
                    self._gather_there(submission, request, given, output)
                    continue
            array, copy = writable_array(output)
            self._add_all_gather(submission, given, array, copy)
        return self._calls.submit("all_gather", list(outputs), submission, opts=opts, inputs=inputs)

    @staticmethod
    def _gather_there(
        submission: Submission, request: Request, given: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Add an operation as :meth:`_add_all_gather` does, in the memory of the tensors' device."""
        require_dense(given, "all_gather")
        row = plain_of(given, request.device).reshape(1, -1)
        request.input = memory_of(row, request.device)
        request.output, copy = writable(output, request.device, shape=(-1, row.shape[1]))
        submission.add(request, copy)

    def _copy_rows(self, rows: torch.Tensor, output: torch.Tensor, result: Result) -> None:
        """Copy rows that came in the core's order to the output, in the group's order."""
        ordered = torch.empty_like(rows)
        ordered[self._order] = rows
        output.detach().copy_(ordered.view(output.shape))

    def _ordered(self, of_members: Sequence[_T]) -> Sequence[_T]:
        """Return a list with an entry for each member, in the core's order; a list of another length is returned as it is."""
        return (
            [of_members[member] for member in self._order]
            if self._order and len(of_members) == len(self._order)
            else of_members
        )

    @staticmethod
    def _add_all_gather(
        submission: Submission, given: torch.Tensor, into: npt.NDArray[Any], copy: Copy | None
    ) -> None:
        require_dense(given, "all_gather")
        # As one row, so that the coordinator finds ranks whose tensors have other sizes: other numbers of rows it would allow.
        source = array_of(plain_of(given)).reshape(1, -1)
        submission.add(
            Request(
                OpKind.ALLGATHER,
                input=source,
                output=into.reshape(-1, source.shape[1]),
                dtype=core_dtype(given),
            )
            if source.size
            else Request(OpKind.BARRIER),
            copy,
        )

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> HvdlabWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    def allgather(self, lists: Any, inputs: Any, opts: Any = None) -> HvdlabWork:
        lists = lists if lists and isinstance(lists[0], (list, tuple)) else [lists]
        given = single("all_gather", inputs, "input")
        if len(lists) != 1:
            raise InvalidRequestError("all_gather: requires a single-element output tensor list.")
        return self._gather_lists(lists, [given], lists[0], opts)

    def _gather_lists(self, lists: Any, inputs: list[torch.Tensor], value: Any, opts: Any) -> HvdlabWork:
        """Submit one all_gather for each input; ``value`` is that of the work's future, as the caller has nested its outputs."""
        submission = Submission()
        for outputs, given in zip(lists, inputs, strict=True):
            require_outputs("all_gather", outputs, given, self.rank(), self.size())
            counts = [output.numel() for output in outputs]
            if len(set(counts)) == 1 and counts[0] == given.numel():
                gathered = torch.empty(sum(counts), dtype=given.dtype)
                copy = functools.partial(scatter_into, self._ordered(outputs), gathered)
                self._add_all_gather(submission, given, array_of(gathered), copy)
            else:
                self._add_exchange(submission, outputs, [given] * self.size(), [given.numel()] * self.size())
        return self._calls.submit("all_gather", list(value), submission, opts=opts, inputs=inputs)

    def allgather_coalesced(self, lists: Any, inputs: Any, opts: Any = None) -> HvdlabWork:
        given = listed(inputs)
        if not given or any(len(each) != len(given) for each in lists):
            raise InvalidRequestError(
                "all_gather: requires non-empty tensor lists, each as long as that of the inputs."
            )
        by_input = [[each[i] for each in lists] for i in range(len(given))]
        return self._gather_lists(by_input, given, lists, opts)

    def _add_exchange(
        self,
        submission: Submission,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        sends: Sequence[int],
        receives: Sequence[int] | None = None,
        root: int = -1,
    ) -> None:
        """Add one alltoall of the core.

        Args:
            submission: Gets the request.
            outputs: The tensors for the received elements, which fill one after the other.
            inputs: The tensors that are sent, one behind the other.
            sends: How many elements go to each member.
            receives: How many elements come from each member; by default an output for each.
            root: The rank of the world that a gather or scatter names, so that ranks with different roots disagree.
        """
        inputs, outputs, sends = self._ordered(inputs), self._ordered(outputs), self._ordered(sends)
        receives = None if receives is None else self._ordered(receives)
        tensors = (*inputs, *outputs)
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise InvalidRequestError(f"All tensors of one operation must have one dtype, not {dtypes}.")
        for tensor in tensors:
            require_dense(tensor, "all_to_all")
        dtype = tensors[0].dtype
        known = dtype in DTYPES
        width = 1 if known else tensors[0].element_size()
        flat = (
            # Behind an empty tensor, since cat() refuses an empty list: ranks other than a scatter's root
            # send nothing.
            torch.cat([torch.empty(0, dtype=dtype), *(resolved(t).reshape(-1) for t in inputs)])
            if known
            else (torch.cat([torch.empty(0, dtype=torch.uint8), *(plain_of(t) for t in inputs)]))
        )
        counts = [output.numel() for output in outputs] if receives is None else list(receives)
        expected = tuple(count * width for count in counts)
        landing: list[torch.Tensor] = []

        def allocate(shape: tuple[int, ...]) -> npt.NDArray[Any]:
            landing.append(torch.empty(math.prod(shape), dtype=flat.dtype))
            return ADAPTER.host_view(landing[0])

        def copy(result: Result) -> None:
            received = tuple(count for count in result.received_splits or ())
            # Without zeros: a rank has no output for members that send it nothing, as all ranks but the root
            # of a gather.
            if tuple(filter(None, received)) != tuple(filter(None, expected)):
                raise _unexpected(received, expected, width, self._engine.rank)
            scatter_into(outputs, landing[0] if known else landing[0].view(dtype), result)

        splits = tuple(count * width for count in sends)
        request = Request(
            OpKind.ALLTOALL,
            input=ADAPTER.host_view(flat),
            dtype=ADAPTER.dtype(flat),
            splits=splits,
            root=root,
        )
        request.allocate = allocate
        submission.add(request, copy)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> HvdlabWork:
        require_exchange("alltoall", (outputs, inputs), self.size())
        submission = Submission()
        self._add_exchange(submission, outputs, inputs, [tensor.numel() for tensor in inputs])
        return self._calls.submit("all_to_all", list(outputs), submission, opts=opts, inputs=inputs)

    def all_to_all_single(
        self, output: Any, given: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> HvdlabWork:
        submission = Submission()
        sends = self._elements(given, input_splits, "input")
        receives = self._elements(output, output_splits, "output")
        if self._order:
            flat: Any = given.detach().reshape(-1)
            landing: Any = torch.empty(output.numel(), dtype=output.dtype)
            self._add_exchange(submission, landing.split(receives), flat.split(sends), sends)
            self._then_copy(submission, lambda: landing, output)
        else:
            self._add_exchange(submission, [output], [given], sends, receives)
        return self._calls.submit("all_to_all", [output], submission, opts=opts, inputs=given)

    def _elements(self, tensor: torch.Tensor, splits: Sequence[int] | None, which: str) -> list[int]:
        """Return how many elements of a tensor belong to each member, from splits in rows of dimension 0."""
        return [
            count * math.prod(tensor.shape[1:]) for count in split_rows(tensor, splits, which, self.size())
        ]

    def gather(self, lists: Any, inputs: Any, opts: Any) -> HvdlabWork:
        given, root = single("gather", inputs, "input"), self._root("gather", opts)
        is_root = root == self.rank()
        outputs = parts_of_root("gather", lists, given, self.size(), root, is_root=is_root, which="output")
        submission = Submission()
        sends = [given.numel() if member == root else 0 for member in range(self.size())]
        self._add_exchange(submission, outputs, [given], sends, root=self._members[root])
        return self._calls.submit("gather", outputs, submission, opts=opts, inputs=inputs)

    def scatter(self, outputs: Any, lists: Any, opts: Any) -> HvdlabWork:
        output, root = single("scatter", outputs, "output"), self._root("scatter", opts)
        is_root = root == self.rank()
        inputs = parts_of_root("scatter", lists, output, self.size(), root, is_root=is_root, which="input")
        submission = Submission()
        sends = [tensor.numel() for tensor in inputs] or [0] * self.size()
        self._add_exchange(submission, [output], inputs, sends, root=self._members[root])
        return self._calls.submit("scatter", [output], submission, opts=opts, inputs=inputs)

    def barrier(self, opts: Any = None) -> HvdlabWork:
        submission = Submission()
        submission.add(Request(OpKind.BARRIER))
        return self._calls.submit("barrier", [], submission, opts=opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait at a barrier with a limit.

        Args:
            timeout: Limit of the wait, as a number in seconds; by default the group's timeout.
            wait_all_ranks: Has no effect: an error always names all ranks that are missing.

        Raises:
            AbortedError: A rank did not come in time; raised on all ranks that wait. The group goes on.
        """
        submission = Submission()
        submission.add(Request(OpKind.BARRIER))
        self._calls.submit("monitored_barrier", [], submission).wait(timeout or 0.0)

    # -- point to point -----------------------------------------------------------------------------------------------

    # The arguments have torch's names, by which users pass them.

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> HvdlabWork:
        return self._messages.send(tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> HvdlabWork:
        return self._messages.receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HvdlabWork:
        return self._messages.receive_from_any(tensors, tag)

    # The names by which torch before 2.13 calls these.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


for _method in FORMS:
    setattr(HvdlabProcessGroup, _method, in_all_forms(_method, getattr(HvdlabProcessGroup, _method)))

untraced_methods(HvdlabProcessGroup)  # again, for the methods of the loop


def _operator(opts: Any) -> Any:
    """Return the reduction operator, which torch passes in an object of options or by itself; the sum if there is none."""
    found = getattr(opts, "reduceOp", opts)
    return found if isinstance(found, (dist.ReduceOp, _Types)) else dist.ReduceOp.SUM


def _set_operator(request: Request, operator: Any, tensor: torch.Tensor) -> None:
    """Set a reduction's operator to c10d's. Raises ``UnsupportedError`` if the core has none such for the tensor's dtype."""
    found = next(((name, op) for number, name, op in _OPERATORS if operator == number), None)
    if found is None:
        raise UnsupportedError(f"{request.kind.label} with {operator} does not exist in hvdlab.")
    name, op = found
    if tensor.is_complex() and op not in _LINEAR:
        raise UnsupportedError(f"{name} of complex tensors does not exist; only sums and averages do.")
    if tensor.dtype is torch.bool:
        op = _OF_BOOL.get(op, op)
    check_supported(request.kind, request.dtype, op)
    scales = name == "PREMUL_SUM"
    # torch shows the factor of a PREMUL_SUM in no attribute, only in the state that it pickles.
    request.reduction = Reduction(op, float(operator.__getstate__()[1])) if scales else PLAIN[op]


def _other_shapes(shapes: Sequence[Sequence[int]]) -> MismatchError:
    said = [
        Disagreement((member,), f"a sparse tensor of shape {shape}", "this call")
        for member, shape in enumerate(shapes)
    ]
    return MismatchError("all_reduce", 0, said)


def _unexpected(received: Sequence[int], expected: Sequence[int], width: int, rank: int) -> MismatchError:
    got, wanted = ([count // width for count in counts] for counts in (received, expected))
    said = Disagreement((rank,), f"outputs for {wanted} elements, and the ranks sent {got}", "this call")
    return MismatchError("all_to_all", 0, [said])
