"""Which bucket of ``DistributedDataParallel`` an operation reduces, and whose gradients are in it.

DDP's reducer calls the group from C++ with nothing but a tensor, and holds its lock meanwhile, so that it can't be asked. All that is
needed passes by, however:

* The wrapper is on the stack when it compares and broadcasts the parameters of a model that is being wrapped, and when it makes its
  buckets anew.
* The first buckets are made by a function of torch's, which gives the same again.
* After the first pass the buckets are made anew, in the order in which gradients became ready. Rank 0 broadcasts them, so that all
  ranks have the same: the index of each parameter, bucket by bucket, and then how many each bucket has.
* The buckets of a pass are reduced in order, and a pass is one run of the autograd engine, which knows the parameter that it has come
  to. Buckets keep their memory, too.

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
"""So many frames lie between the wrapper, or a hook that has a bucket, and an operation, at most."""
_NAMED = 2
"""Parameters of a bucket that are named; the others are counted."""
_WRAPPER_FILE = torch_ddp.__file__
_BACKWARD = "_engine_run_backward"
"""The function of torch's that runs the autograd engine."""

NESTED = -1
"""A run within another one, as activation checkpoints begin it: it goes on with the pass that the outer one is."""
_UNKNOWN = -2


def bucket_text(index: int, names: Sequence[str]) -> str:
    """``DDP bucket 2: layer4.weight, layer4.bias and 3 more``.

    Args:
        index: The bucket's number in its model, from 0 on, as torch's ``GradBucket`` has it.
        names: Of its parameters.
    """
    more = len(names) - _NAMED
    return f"DDP bucket {index}: {', '.join(names[:_NAMED])}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced as one tensor.

    Attributes:
        text: What errors call it.
        count: Number of elements of that tensor.
        dtype: Theirs.
    """

    text: str
    count: int
    dtype: torch.dtype


@dataclass
class Layout:
    """The buckets of one reducer, and how far a pass has come.

    Attributes:
        buckets: In the order in which they are reduced.
        certain: Whether all of them are, in each pass; else only a bucket whose size is its own is known.
        run: The run of the autograd engine that the pass is; unknown as long as only nested ones have reduced some.
        next: Of that pass, the first bucket that was not reduced yet.
        places: The bucket whose memory begins at an address.
    """

    buckets: Sequence[Bucket]
    certain: bool = True
    run: int = _UNKNOWN
    next: int = 0
    places: dict[int, int] = field(default_factory=dict)

    def find(self, tensor: torch.Tensor, run: int) -> int | None:
        """The bucket that this tensor is, if it can be one of them."""
        count = tensor.numel()
        known = self.places.get(_address(tensor))
        if known is not None and self.buckets[known].count == count:
            return known
        goes_on = self.next < len(self.buckets) and (run in (self.run, NESTED) or self.run == _UNKNOWN)
        first = self.next if goes_on else 0
        fits = [i for i in range(first, len(self.buckets)) if self.buckets[i].count == count]
        return fits[0] if fits and (self.certain or len(fits) == 1) else None

    def reduced(self, index: int, tensor: torch.Tensor, run: int) -> None:
        """This tensor was that bucket."""
        if run != NESTED:
            self.run = run
        elif self.next >= len(self.buckets):
            self.run = _UNKNOWN
        self.next = index + 1
        # What a hook of torch's own has made of it, such as float16, is elsewhere the next time.
        if tensor.layout is torch.strided and tensor.dtype == self.buckets[index].dtype:
            self.places[_address(tensor)] = index


class _Wrapper:
    """What is known of one ``DistributedDataParallel``.

    Args:
        wrapper: The wrapped model. It keeps what is known of it, and nothing here keeps it.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        #: The reducer that the layout is of; ``agree`` makes another one.
        self._reducer: weakref.ref[Any] | None = None
        self._layout: Layout | None = None
        #: What was broadcast as the buckets were made anew, until it is read.
        self._announced: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._names: dict[int, str] = {}

    def announce(self, tensor: torch.Tensor) -> None:
        """One of the two tensors that say what the new buckets are. It has the values of rank 0 once the broadcast is over."""
        if len(self._announced) >= 2:
            self._announced.clear()
        self._announced.append(tensor)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """A parameter's name in the model."""
        if not self._names:
            self._read_parameters()
        return self._names.get(id(parameter))

    def layout(self) -> Layout | None:
        """The buckets as they are now; ``None`` if they are not known."""
        wrapper: Any = self._wrapper()
        reducer = getattr(wrapper, "reducer", None)
        if reducer is None:
            return None
        if self._reducer is None or self._reducer() is not reducer:
            if self._reducer is not None:  # those were another reducer's
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
        """The buckets before the first pass: what torch computes as the model is wrapped."""
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
            width = 2 if parameters[0].is_complex() else 1  # reduced as real and imaginary parts
            count = width * sum(parameter.numel() for parameter in parameters)
            dtype = parameters[0].dtype.to_real() if width == 2 else parameters[0].dtype
            buckets.append(Bucket(bucket_text(number, names), count, dtype))
        return Layout(buckets, certain=not getattr(wrapper, "skip_all_reduce_unused_params", False))


def _announced_buckets(indices: torch.Tensor, sizes: torch.Tensor, parameters: int) -> list[list[int]] | None:
    """The buckets that were broadcast; ``None`` if that is not what these tensors are."""
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
        self._lock = threading.Lock()
        self._wrappers: weakref.WeakKeyDictionary[Any, _Wrapper] = weakref.WeakKeyDictionary()

    def see(self, tensor: torch.Tensor | None, caller: FrameType | None) -> None:
        """The group was asked for an operation that a wrapper may have begun itself.

        Args:
            tensor: Of a broadcast; ``None`` for other operations.
            caller: The frame that called the group; ``None`` if none did.
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
                        if tensor is not None and frame is caller and frame.f_code.co_name == "_pre_forward":
                            known.announce(tensor.detach())
                    return
            frame = frame.f_back

    def text_of(self, tensor: torch.Tensor | None, caller: FrameType | None) -> str:
        """What errors call the bucket that is reduced, or communicated by a hook; empty if it is none, or none that is known.

        Args:
            tensor: Of an all_reduce; ``None`` for other operations, which hooks alone call.
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
        """Of an operation that C++ has begun in a run of the autograd engine."""
        if not (tensor.is_floating_point() or tensor.is_complex()):  # which parameters were used
            return ""
        wrappers, ready = list(self._wrappers.values()), _ready_parameter()
        if ready is not None:  # the bucket's last, or one of a later bucket of the same model
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
        """Of an operation that a hook of the user's, or of torch's, has begun with a bucket."""
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
    """The parameter whose gradient this thread's run of the autograd engine has just computed."""
    found = getattr(torch._C._current_autograd_node(), "variable", None)
    return found if isinstance(found, torch.Tensor) else None


def _is_nested(frame: FrameType | None) -> bool:
    """Whether the run of the autograd engine that this frame has begun is within another one."""
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_code.co_name == _BACKWARD:
            return True
    return False


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0
