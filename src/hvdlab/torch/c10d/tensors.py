"""Torch's tensors as memory of the core: their own memory if the core can read and write it, otherwise a copy, or bytes.

Checks of arguments that a rank can make by itself are here, too. Their errors use the words of torch's own backends, so that code
that looks for these words in an error finds them.

Where a ``device`` is given, it is the class of the memory that the core is to work in: the host's, or that of the tensor's device if the
group has a data plane for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from hvdlab.collectives.engine.requests import Result
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.base import HOST
from hvdlab.torch.adapter import ADAPTER, CUDA_TENSORS, DTYPES

Tensors = list[torch.Tensor]


def listed(tensors: Any) -> Tensors:
    """Return one tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def single(operation: str, tensors: Any, which: str = "") -> torch.Tensor:
    """Return the only tensor of a list, or the tensor itself; raises ``InvalidRequestError`` if there are several or none.

    ``which`` is ``input`` or ``output``, for the error of an operation that has both.
    """
    given = listed(tensors)
    if len(given) != 1:
        kind = f"{which} tensor list" if which else "tensor list"
        raise InvalidRequestError(f"{operation}: requires a single-element {kind}, not one of {len(given)}.")
    return given[0]


def first(tensors: Any) -> Any:
    """Return the first tensor of nested lists; ``None`` if there is none."""
    while isinstance(tensors, (list, tuple)):
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def require_dense(tensor: torch.Tensor, operation: str) -> None:
    """Raise ``UnsupportedError`` for a tensor that is sparse, or has no data."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise UnsupportedError(
            f"{operation}: only supports dense tensors with data, not {tensor.layout} on {tensor.device}."
        )


def require_member(operation: str, rank: int, size: int, which: str = "rank") -> int:
    """Return a rank's number in its group, such as a root's; raises ``InvalidRequestError`` if the group has no such number."""
    if not 0 <= rank < size:
        raise InvalidRequestError(f"{operation}: invalid {which}: {rank}; the group has {size} ranks.")
    return rank


def require_tag(operation: str, tag: int) -> None:
    if tag < 0:
        raise InvalidRequestError(f"{operation}: Tag must be nonnegative, not {tag}.")


def require_outputs(
    operation: str, outputs: Sequence[torch.Tensor], given: torch.Tensor, rank: int, size: int
) -> None:
    """Raise ``InvalidRequestError`` unless an all_gather has one output for each rank, all of the input's dtype.

    This rank's own output must have as many elements as its input; other ranks' inputs may have other sizes.
    """
    if len(outputs) != size:
        raise InvalidRequestError(
            f"{operation}: invalid output tensor list at index 0 (expected length {size}, got {len(outputs)}): "
            "one tensor for each rank."
        )
    for index, output in enumerate(outputs):
        if output.dtype != given.dtype:
            raise InvalidRequestError(
                f"{operation}: invalid tensor type at index {index} (expected {given.dtype}, got {output.dtype})."
            )
    if outputs[rank].numel() != given.numel():
        raise InvalidRequestError(
            f"{operation}: invalid tensor size at index {rank} (expected {tuple(given.shape)}, got "
            f"{tuple(outputs[rank].shape)}): this rank's own output gets its input."
        )


def parts_of_root(
    operation: str, lists: Any, tensor: torch.Tensor, size: int, root: int, *, is_root: bool, which: str
) -> Tensors:
    """Return the root's list of tensors for a gather or scatter, one for each rank; an empty list on other ranks.

    Args:
        operation: ``gather`` or ``scatter``.
        lists: As torch's caller gave it: the list in a list, the list itself, or nothing.
        tensor: The rank's own tensor, whose dtype the parts must have.
        size: Number of ranks.
        root: The root's number in the group.
        is_root: Whether this rank is the root.
        which: ``output`` for a gather, ``input`` for a scatter.

    Raises:
        InvalidRequestError: The list is missing on the root or given elsewhere, or has another length or dtype,
            or the root's own part has another size than its tensor.
    """
    given = list(lists) if lists else []
    if given and isinstance(given[0], (list, tuple)):
        if len(given) != 1:
            raise InvalidRequestError(
                f"{operation}: requires a single-element {which} list containing a list with {size} tensors."
            )
        given = list(given[0])
    if not is_root:
        if given:
            raise InvalidRequestError(f"{operation}: requires empty {which} on non-root ranks.")
        return []
    if not given:
        raise InvalidRequestError(
            f"{operation}: requires a single-element {which} list containing a list with {size} tensors."
        )
    if len(given) != size:
        raise InvalidRequestError(
            f"{operation}: Incorrect {which} list size {len(given)}. {which.capitalize()} list size should be {size}, same as "
            "size of the process group."
        )
    for index, part in enumerate(given):
        if part.dtype != tensor.dtype:
            raise InvalidRequestError(
                f"{operation}: invalid tensor type at index {index} (expected {tensor.dtype}, got {part.dtype})."
            )
    if given[root].numel() != tensor.numel():
        raise InvalidRequestError(
            f"{operation}: invalid tensor size at index {root} (expected {tuple(tensor.shape)}, got "
            f"{tuple(given[root].shape)}): the root's own part and its tensor have equally many elements."
        )
    return given


def split_rows(tensor: torch.Tensor, splits: Sequence[int] | None, which: str, size: int) -> list[int]:
    """Return how many rows (of dimension 0) of an all_to_all_single's tensor belong to each member; without splits, equally many.

    ``which`` is ``input`` or ``output``. Raises ``InvalidRequestError`` if the splits do not fit the tensor and the group.
    """
    rows = (tensor.shape or (1,))[0]
    if not splits:
        if rows % size:
            raise InvalidRequestError(
                f"all_to_all_single: Tensor's dim 0 does not divide equally across group size: the {which} has {rows} rows for "
                f"{size} ranks; give the splits."
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size:
        raise InvalidRequestError(
            f"all_to_all_single: Number of tensor splits not equal to group size: {len(counts)} {which} splits for {size} ranks."
        )
    if sum(counts) != rows or min(counts) < 0:
        raise InvalidRequestError(
            f"all_to_all_single: Split sizes doesn't match total dim 0 size: the {which} splits {counts} for {rows} rows."
        )
    return counts


def require_exchange(method: str, arguments: Sequence[Any], size: int) -> None:
    """Raise ``InvalidRequestError`` if the tensors or splits of an exchange do not fit the group; other methods pass.

    Args:
        method: Torch's method.
        arguments: Its outputs and inputs, and after them their splits if it has such.
        size: Number of ranks.
    """
    if method == "alltoall":
        for tensors, which in zip(arguments, ("output", "input"), strict=False):
            if len(tensors) != size:
                raise InvalidRequestError(
                    f"all_to_all: Number of {which} tensors not equal to group size: {len(tensors)} for {size} ranks."
                )
    elif method in ("alltoall_base", "all_to_all_single"):
        for tensor, splits, which in zip(arguments, arguments[2:4], ("output", "input"), strict=False):
            split_rows(tensor, splits, which, size)


Copy = Callable[[Result], None]
"""Copies the result of one request to the user's tensor."""


def resolved(tensor: torch.Tensor, device: str = HOST) -> torch.Tensor:
    """Return a tensor's elements in contiguous memory: the tensor's own memory if possible."""
    tensor = tensor.detach().cpu() if device == HOST else tensor.detach()
    return tensor.contiguous().resolve_conj().resolve_neg()


def plain_of(tensor: torch.Tensor, device: str = HOST) -> torch.Tensor:
    """Return the same as :func:`resolved`, but flat and as bytes if the core does not know the dtype."""
    tensor = resolved(tensor, device)
    return tensor if tensor.dtype in DTYPES else tensor.reshape(-1).view(torch.uint8)


def real_parts(tensor: torch.Tensor, device: str = HOST) -> torch.Tensor:
    """Return a complex tensor as its real and imaginary parts, each of which can be summed and averaged; others as they are.

    The parts may lie in a copy: a result that is written to them needs :func:`writable` to reach the tensor.
    """
    return torch.view_as_real(resolved(tensor, device)) if tensor.is_complex() else tensor


def memory_of(plain: torch.Tensor, device: str) -> Any:
    """Return the memory of a plain tensor that is on this device."""
    return ADAPTER.host_view(plain) if device == HOST else CUDA_TENSORS.view(plain)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two dense tensors may have elements in the same memory: whether they have one storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return ADAPTER.host_view(plain_of(tensor))


def core_dtype(tensor: torch.Tensor) -> Any:
    return DTYPES.get(tensor.dtype, DTYPES[torch.uint8])


def writable_array(tensor: torch.Tensor, *, reducing: bool = False) -> tuple[npt.NDArray[Any], Copy | None]:
    """Return the same as :func:`writable`, in the host's memory and with the tensor's shape."""
    return writable(tensor, HOST, reducing=reducing)


def writable(
    tensor: torch.Tensor, device: str, *, reducing: bool = False, shape: tuple[int, ...] | None = None
) -> tuple[Any, Copy | None]:
    """Return memory with a tensor's values that the core may write a result to.

    Args:
        tensor: The user's tensor.
        device: Class of the memory.
        reducing: Whether the core computes with the elements; it can only move those of a dtype that it does not know. A
            complex tensor's memory is that of its real and imaginary parts.
        shape: Of the memory, with -1 for one extent that follows from the others; by default the tensor's, or its parts'.

    Returns:
        The memory, and a function that copies the result to the tensor if the memory is not the tensor's own.

    Raises:
        UnsupportedError: ``reducing``, and the core does not know the dtype.
    """
    if reducing:
        ADAPTER.dtype(tensor.real)  # only for its error
    # The parts are taken here, not by the caller: of a conjugate they are a copy, and only the user's tensor shows that its
    # elements are to be copied back.
    plain = plain_of(real_parts(tensor, device) if reducing else tensor, device)
    memory = memory_of(plain if shape is None else plain.reshape(shape), device)
    if plain.data_ptr() == tensor.data_ptr() and not (tensor.is_conj() or tensor.is_neg()):
        ADAPTER.mark_written(tensor)
        return memory, None

    def copy(result: Result) -> None:
        values = plain if plain.dtype == tensor.dtype else plain.view(tensor.dtype)
        tensor.detach().copy_(values.view(tensor.shape))

    return memory, copy


def scatter_into(outputs: Iterable[torch.Tensor], gathered: torch.Tensor, result: Result) -> None:
    """Copy received tensors to the outputs, one after the other."""
    start = 0
    for output in outputs:
        stop = start + output.numel()
        output.detach().copy_(gathered[start:stop].view(output.shape))
        start = stop


def _is_plain(argument: Any) -> bool:
    """Return whether torch's own backend can take the memory of all tensors in an argument as it is."""
    # One loop and few calls: all operations pay for it.
    for each in argument if isinstance(argument, (list, tuple)) else (argument,):
        if isinstance(each, (list, tuple)):
            if not _is_plain(each):
                return False
        elif (
            isinstance(each, torch.Tensor)
            and each.layout is torch.strided
            and (not each.is_contiguous() or each.is_neg() or each.is_conj())
        ):
            return False
    return True


def contiguous(argument: Any) -> Any:
    """Return an argument of torch's with contiguous copies in the place of dense tensors that are not contiguous.

    Tensors with the negative or conjugate bit count as such, since their memory has other values.

    Args:
        argument: A tensor of the host, nested lists of them, or anything more.

    Returns:
        The argument itself if there is nothing to copy.
    """
    if _is_plain(argument):
        return argument
    if isinstance(argument, torch.Tensor):
        return resolved(argument)
    return type(argument)(map(contiguous, argument))


class CopyBack:
    """Copies of an operation's outputs in which torch's backend works, and the user's tensors that get their values.

    Args:
        operation: The operation's name, for errors.
        outputs: The user's tensors, in nested lists or not.
        copies: The same from :func:`contiguous`.
        written: Whether the operation writes to them on this rank.

    Raises:
        InvalidRequestError: An output has elements that lie in the same memory.
    """

    def __init__(self, operation: str, outputs: Any, copies: Any, *, written: bool) -> None:
        self._outputs = outputs
        self._pairs = list(_pairs(outputs, copies)) if written else []
        for output, _ in self._pairs:
            if any(
                stride == 0 and size > 1 for stride, size in zip(output.stride(), output.shape, strict=True)
            ):
                raise InvalidRequestError(
                    f"{operation}: an output of {tuple(output.shape)} has elements that share memory, as expand() "
                    "makes them; clone it."
                )

    def copy(self) -> Any:
        """Copy the results to the user's tensors, and return these as the value of the operation. Any thread."""
        # Only in this mode a thread of torch's may write to the tensors of a user who works in it.
        with torch.inference_mode():
            for output, copied in self._pairs:
                output.detach().copy_(copied)
        return self._outputs if isinstance(self._outputs, list) else [self._outputs]


def _pairs(outputs: Any, copies: Any) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over the outputs that were copied, with their copies."""
    if isinstance(outputs, torch.Tensor):
        if outputs is not copies:
            yield outputs, copies
    elif outputs is not copies:
        for output, copied in zip(outputs, copies, strict=True):
            yield from _pairs(output, copied)
