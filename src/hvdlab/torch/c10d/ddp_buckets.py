"""Which bucket of ``DistributedDataParallel`` an operation reduces, and which parameters' gradients are in it.

DDP's reducer calls the group from C++ with nothing but a tensor, and holds its lock meanwhile, so that this module can't ask it.
But the group sees all that is needed:

* The wrapper is on the stack when it compares and broadcasts the parameters of a model that is being wrapped, and when it makes its
  buckets again.
* A function of torch's computes the first buckets, and computes the same ones when this module calls it again.
* After the first pass DDP makes the buckets again, in the order in which gradients became ready. Rank 0 broadcasts them, so that all
  ranks have the same: first the index of each parameter, bucket by bucket, and then the number of parameters of each bucket.
* DDP reduces the buckets of a pass in order. A pass is one run of the autograd engine, which knows the parameter whose gradient it
  has just computed. And a bucket's tensor stays at the same address.

A hook in Python (``register_comm_hook``) has the bucket itself on the stack.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as torch_ddp

_FRAMES = 6
"""The most frames that lie between an operation and the wrapper, or the hook that has a bucket."""
_NAMED = 2
"""Parameters of a bucket that errors name; they only count the others."""
_WRAPPER_FILE = torch_ddp.__file__
_BACKWARD = "_engine_run_backward"
"""The function of torch's that runs the autograd engine."""

NESTED = -1
"""Stands for a run of the engine within another one, as activation checkpoints begin it: it belongs to the outer run's pass."""
_UNKNOWN = -2
"""Stands for a pass of which no run but nested ones is known."""


def bucket_text(index: int, names: Sequence[str]) -> str:
    """Return a text such as ``DDP bucket 2: layer4.weight, layer4.bias and 3 more``.

    Args:
        index: The bucket's number in its model, from 0 on, as torch's ``GradBucket`` has it.
        names: The names of its parameters.
    """
    more = len(names) - _NAMED
    return f"DDP bucket {index}: {', '.join(names[:_NAMED])}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced as one tensor.

    Attributes:
        text: The name by which errors call it.
        count: Number of elements of that tensor.
        dtype: Their dtype.
    """

    text: str
    count: int
    dtype: torch.dtype


@dataclass
class Layout:
    """The buckets of one reducer, and how far a pass has come.

    Attributes:
        buckets: The buckets in the order in which DDP reduces them.
        certain: Whether DDP reduces all of them in each pass; if not, only a bucket of a size that no other has can be identified.
        run: The number of the autograd engine's run that is the present pass; unknown as long as only nested runs have reduced
            buckets.
        next: Index of the first bucket that this pass has not reduced yet.
        places: The index of the bucket whose memory begins at an address.
    """

    buckets: Sequence[Bucket]
    certain: bool = True
    run: int = _UNKNOWN
    next: int = 0
    places: dict[int, int] = field(default_factory=dict)

    def find(self, tensor: torch.Tensor, run: int) -> int | None:
        """Return the index of the bucket that this tensor is; ``None`` if it is none of them, or is ambiguous."""
        count = tensor.numel()
        known = self.places.get(_address(tensor))
        if known is not None and self.buckets[known].count == count:
            return known
        goes_on = self.next < len(self.buckets) and (run in (self.run, NESTED) or self.run == _UNKNOWN)
        first = self.next if goes_on else 0
        fits = [i for i in range(first, len(self.buckets)) if self.buckets[i].count == count]
        return fits[0] if fits and (self.certain or len(fits) == 1) else None

    def reduced(self, index: int, tensor: torch.Tensor, run: int) -> None:
        """Record that this run has reduced the bucket with this index, and that the tensor was its memory."""
        if run != NESTED:
            self.run = run
        elif self.next >= len(self.buckets):
            self.run = _UNKNOWN
        self.next = index + 1
        # A tensor that one of torch's own hooks has made of the bucket, such as one of float16, has another address the next time.
        if tensor.layout is torch.strided and tensor.dtype == self.buckets[index].dtype:
            self.places[_address(tensor)] = index


class _Wrapper:
    """The buckets and parameter names of one ``DistributedDataParallel``.

    Args:
        wrapper: The wrapped model. This object lives as long as the wrapper does, and does not keep it alive.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        #: The reducer whose buckets the layout describes; ``agree`` gives the wrapper another one.
        self._reducer: weakref.ref[Any] | None = None
        #: The buckets as they were read last; ``None`` if they are not known.
        self._layout: Layout | None = None
        #: The tensors that rank 0 broadcast when the buckets were made again, until :meth:`layout` has read them.
        self._announced: list[torch.Tensor] = []
        #: The parameters in the reducer's order, and their names by ``id``.
        self._parameters: list[torch.Tensor] = []
        self._names: dict[int, str] = {}

    def announce(self, tensor: torch.Tensor) -> None:
        """Keep one of the two tensors that describe the new buckets. It has the values of rank 0 once the broadcast is over."""
        # A third tensor begins the next pair.
        if len(self._announced) >= 2:
            self._announced.clear()
        self._announced.append(tensor)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return a parameter's name in the model."""
        if not self._names:
            self._read_parameters()
        return self._names.get(id(parameter))

    def layout(self) -> Layout | None:
        """Return the buckets as they are now; ``None`` if they are not known."""
        wrapper: Any = self._wrapper()
        reducer = getattr(wrapper, "reducer", None)
        if reducer is None:
            return None
        if self._reducer is None or self._reducer() is not reducer:
            if self._reducer is not None:  # the tensors described another reducer's buckets
                self._announced.clear()
            self._reducer = weakref.ref(reducer)
            self._read_parameters()
            self._layout = self._made(wrapper, self._first(wrapper))
        if len(self._announced) == 2:
            indices, sizes = self._announced
            self._announced = []
            self._layout = self._made(wrapper, _announced_buckets(indices, sizes, len(self._parameters)))
        return self._layout

    def _read_parameters(self) -> None:
        wrapper: Any = self._wrapper()
        self._parameters = list(wrapper._build_params_for_reducer()[0])
        self._names = {id(parameter): name for name, parameter in wrapper.module.named_parameters()}

    @staticmethod
    def _first(wrapper: Any) -> list[list[int]]:
        """Return the buckets before the first pass, as lists of parameters' indices: those that torch computes when it wraps the model."""
        parameters, sparse = wrapper._build_params_for_reducer()
        settings = getattr(wrapper, "_bucket_config", None)
        if settings is not None:
            limits, _ = settings.compute_bucket_size_limits(
                static_graph=wrapper.static_graph, find_unused_parameters=wrapper.find_unused_parameters
            )
        elif wrapper.static_graph or not wrapper.find_unused_parameters:  # before torch 2.13
            limits = [sys.maxsize]
        else:
            limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, wrapper.bucket_bytes_cap]  # type: ignore[attr-defined]
        indices, _ = dist._compute_bucket_assignment_by_size(parameters, limits, sparse)  # type: ignore[attr-defined]
        return list(reversed(indices))

    def _made(self, wrapper: Any, indices: Sequence[Sequence[int]] | None) -> Layout | None:
        if indices is None:
            return None
        buckets = []
        for number, bucket in enumerate(indices):
            parameters = [self._parameters[index] for index in bucket]
            names = [self._names.get(id(parameter), "?") for parameter in parameters]
            width = 2 if parameters[0].is_complex() else 1  # real and imaginary parts
            count = width * sum(parameter.numel() for parameter in parameters)
            dtype = parameters[0].dtype.to_real() if width == 2 else parameters[0].dtype
            buckets.append(Bucket(bucket_text(number, names), count, dtype))
        return Layout(buckets, certain=not getattr(wrapper, "skip_all_reduce_unused_params", False))


def _announced_buckets(indices: torch.Tensor, sizes: torch.Tensor, parameters: int) -> list[list[int]] | None:
    """Return the buckets that two broadcast tensors describe; ``None`` if the tensors are no such description."""
    order, counts = indices.tolist(), sizes.tolist()
    if len(order) != parameters + 1 or order[-1] != len(counts) or sum(counts) != parameters:
        return None
    if sorted(order[:-1]) != list(range(parameters)):
        return None
    rest: Iterator[int] = iter(order)
    return [[next(rest) for _ in range(count)] for count in counts]


class Buckets:
    """The wrapped models of one group."""

    def __init__(self) -> None:
        #: Guards the wrappers and their layouts: threads of autograd's use them beside the user's.
        self._lock = threading.Lock()
        #: By the wrapper, which is not kept alive: in a notebook a model is often wrapped again.
        self._wrappers: weakref.WeakKeyDictionary[Any, _Wrapper] = weakref.WeakKeyDictionary()

    def see(self, tensor: torch.Tensor | None, caller: FrameType | None) -> None:
        """Search the stack of an operation for a wrapper, and record it.

        Args:
            tensor: The tensor of a broadcast; ``None`` for other operations.
            caller: The frame that called the group; ``None`` if C++ called it, on a thread without Python frames.
        """
        frame = caller
        for _ in range(_FRAMES):
            if frame is None:
                return
            if frame.f_code.co_filename == _WRAPPER_FILE:
                wrapper = frame.f_locals.get("self")
                if isinstance(wrapper, torch_ddp.DistributedDataParallel):
                    with self._lock:
                        known = self._wrappers.get(wrapper)
                        if known is None:
                            known = self._wrappers[wrapper] = _Wrapper(wrapper)
                        # C++ broadcasts new buckets, so that _pre_forward itself is the caller. Buffers are
                        # broadcast by functions that it calls.
                        if tensor is not None and frame is caller and frame.f_code.co_name == "_pre_forward":
                            known.announce(tensor.detach())
                    return
            frame = frame.f_back

    def text_of(self, tensor: torch.Tensor | None, caller: FrameType | None) -> str:
        """Return the name, for errors, of the bucket that an operation is for; empty if it is for none, or for an ambiguous one.

        Args:
            tensor: The tensor of an all_reduce; ``None`` for other operations, which only hooks call for a bucket.
            caller: As for :meth:`see`.
        """
        run = torch._C._current_graph_task_id()
        if run < 0 or not self._wrappers:
            return ""
        with self._lock:
            if caller is not None and caller.f_code.co_name != _BACKWARD:
                return self._in_hook(caller)
            return "" if tensor is None else self._in_pass(tensor, NESTED if _is_nested(caller) else run)

    def _in_pass(self, tensor: torch.Tensor, run: int) -> str:
        """Return the text for an operation that DDP's reducer, in C++, has begun in a run of the autograd engine."""
        if not (tensor.is_floating_point() or tensor.is_complex()):  # DDP's map of used parameters
            return ""
        wrappers, ready = list(self._wrappers.values()), _ready_parameter()
        if ready is not None:  # a parameter of this model: the bucket's last, or one of a later bucket
            wrappers = [known for known in wrappers if known.name_of(ready) is not None]
        layouts = [layout for known in wrappers if (layout := known.layout()) is not None]
        found = [(layout, index) for layout in layouts if (index := layout.find(tensor, run)) is not None]
        certain = [pair for pair in found if _address(tensor) in pair[0].places]
        found = certain or found
        texts = {layout.buckets[index].text for layout, index in found}
        if len(found) == 1:
            layout, index = found[0]
            layout.reduced(index, tensor, run)
        return texts.pop() if len(texts) == 1 else ""

    def _in_hook(self, caller: FrameType) -> str:
        """Return the text for an operation that a hook in Python, of the user's or of torch's, has begun with a bucket."""
        frame: FrameType | None = caller
        for _ in range(_FRAMES):
            if frame is None or frame.f_code.co_name == _BACKWARD:
                break
            for value in frame.f_locals.values():
                if isinstance(value, dist.GradBucket):  # type: ignore[attr-defined]
                    parameters = value.parameters()
                    for known in self._wrappers.values():
                        names = [known.name_of(parameter) for parameter in parameters]
                        if None not in names:
                            return bucket_text(value.index(), [str(name) for name in names])
                    return ""
            frame = frame.f_back
        return ""


def _ready_parameter() -> torch.Tensor | None:
    """Return the parameter whose gradient this thread's run of the autograd engine has just computed."""
    found = getattr(torch._C._current_autograd_node(), "variable", None)
    return found if isinstance(found, torch.Tensor) else None


def _is_nested(frame: FrameType | None) -> bool:
    """Return whether the run of the autograd engine that this frame has begun is within another run."""
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_code.co_name == _BACKWARD:
            return True
    return False


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0
