"""Hooks for PyTorch, beside its binding :mod:`hvdlab.torch`."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any

from hvdlab.bindings import fingerprints
from hvdlab.bindings.framework_hooks import ArraySource, FrameworkHooks, NotOurs, Part, is_instance_type

if TYPE_CHECKING:
    from types import FrameType

    from hvdlab.bindings.framework_hooks import Bytes

_PLAIN = frozenset({"device", "dtype", "layout", "memory_format", "qscheme", "Size"})

# Attributes of a module that _module() reads in another way, or that only control a call of the module.
_MODULE_OWN = frozenset(
    {"_parameters", "_buffers", "_modules", "_is_full_backward_hook", "_compiled_call_impl", "_version"}
)


_AUTOCAST = ("cpu", "cuda")

# The types whose NaNs and infinities a GPU may count. For others the host finds out whether they have any.
_FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

# The files in which torch switches gradients and autocast off and on again around a caller's code. None of that code holds
# off an interrupt between two of its instructions, so the interrupted thread would go on without gradients.
_SWITCHES = tuple(
    os.path.join("torch", *path)
    for path in (
        ("autograd", "grad_mode.py"),
        ("utils", "_contextlib.py"),
        ("optim", "optimizer.py"),
        ("amp", "autocast_mode.py"),
    )
)


# Code that torch's C++ calls in the middle of a backward pass (the process group, its futures' search for tensors), and the function of
# torch from which that pass is started.
_CALLED_BY_CPP = (
    os.path.join("hvdlab", "torch", "c10d", ""),
    os.path.join("hvdlab", "torch", "dynamo.py"),
    os.path.join("torch", "_jit_internal.py"),
)
_BACKWARD = "_engine_run_backward"
_GRAPH = os.path.join("torch", "autograd", "graph.py")


class TorchHooks(FrameworkHooks):
    """Hooks for PyTorch's tensors on any device, modules and optimizers."""

    preload = True
    binding = "hvdlab.torch"
    # By the first optimizer, also if nothing is compiled. SymPy, which takes half of that, alone, so that orders wait for less in between.
    training = ("sympy", "torch._dynamo")

    # -- values -------------------------------------------------------------------------------------------------------

    def array(self, value: Any) -> ArraySource | None:
        kind = type(value)  # not isinstance(), which may run code of the value's class
        if is_instance_type(kind, "torch", "Tensor"):
            return _of_tensor(value)
        if is_instance_type(kind, "torch", "UntypedStorage"):
            return _of_storage(value)
        return None

    def beside(self, value: Any) -> Iterable[Part]:
        if not is_instance_type(type(value), "torch", "Tensor") or not value.is_quantized:
            return ()
        if "channel" in str(value.qscheme()):
            scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
            return [(".scales", scales), (".zero_points", zeros), (".axis", value.q_per_channel_axis())]
        return [(".scale", value.q_scale()), (".zero_point", value.q_zero_point())]

    def is_plain(self, kind: type) -> bool:
        return kind.__module__ == "torch" and kind.__name__ in _PLAIN

    def plain(self, value: Any) -> tuple[bytes, str]:
        text = repr(value)
        return text.encode(), text

    def parts(self, value: Any) -> Iterable[Part] | None:
        kind = type(value)
        if is_instance_type(kind, "torch.jit", "ScriptModule"):
            held = [(f".{name}", item) for name, item in value.state_dict(keep_vars=True).items()]
            return [*held, (".training", value.training), (".code", value.code)]
        if is_instance_type(kind, "torch.nn", "Module"):
            return _module(value)
        if is_instance_type(kind, "torch.optim", "Optimizer"):
            return _optimizer(value)
        if is_instance_type(kind, "torch", "Tensor"):
            return _sparse(value)
        if is_instance_type(kind, "torch", "Generator"):
            return [(".device", str(value.device)), (".state", value.get_state())]
        raise NotOurs

    def live_arrays(self) -> Iterator[Any]:
        base = getattr(
            sys.modules.get("torch"), "Tensor", None
        )  # it has none while another thread imports it
        return iter(_tracked_instances(base) if isinstance(base, type) else ())

    def memory(self, value: Any) -> tuple[str, int, int] | None:
        if not is_instance_type(type(value), "torch", "Tensor"):
            return None
        try:
            found = value.untyped_storage()
            return str(value.device), int(found.data_ptr()), int(found.nbytes())
        except (RuntimeError, NotImplementedError):  # sparse and fake tensors have none
            return None

    def gradient(self, value: Any) -> Any:
        # torch warns when the gradient of a tensor is read that is no leaf.
        return value.grad if getattr(value, "is_leaf", False) else None

    def nbytes(self, value: Any) -> int:
        size = getattr(value, "nbytes", 0) if type(value).__module__ == "torch" else 0
        return size if isinstance(size, int) else 0

    def reduce(self, value: Any, *, move: bool, apart: int | None) -> Any:
        torch: Any = sys.modules["torch"]
        if type(value) is not getattr(torch, "Tensor", None) or value.layout is not torch.strided:
            return NotImplemented
        if not move and value.device.type != "cpu":
            return NotImplemented
        packed = value.detach().cpu()
        nbytes = packed.numel() * packed.element_size()
        if apart is not None and nbytes >= apart and _is_its_bytes(packed):
            raw = packed.contiguous().view(-1).view(torch.uint8).numpy()
            return make_tensor, (raw, packed.dtype, tuple(packed.shape), value.requires_grad)
        if packed.untyped_storage().nbytes() > nbytes:
            packed = packed.clone()  # without the unused rest of a view's storage
        if packed is not value and (packed.data_ptr() != value.data_ptr() or value.grad_fn is not None):
            return packed.requires_grad_(value.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented

    # -- the process --------------------------------------------------------------------------------------------------

    def random_states(self) -> dict[str, Any]:
        torch: Any = sys.modules["torch"]
        found = {"torch": torch.get_rng_state()}
        # Not before the program uses a GPU: to ask for the state would make a context there.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["torch.cuda"] = torch.cuda.get_rng_state()
        return found

    def settings(self) -> dict[str, Any]:
        torch: Any = sys.modules["torch"]
        backends = torch.backends
        return {
            "version": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "cudnn.benchmark": backends.cudnn.benchmark,
            "cudnn.deterministic": backends.cudnn.deterministic,
            "cuda": torch.version.cuda,
            "anomaly detection": torch.is_anomaly_enabled(),
            "gradients enabled": torch.is_grad_enabled(),
        }

    def current_device(self) -> str:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return ""
        return f"cuda:{cuda.current_device()}"

    def devices_in_use(self) -> list[tuple[int, str]] | None:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            if cuda is None or not cuda.is_initialized():
                return None
            devices = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
            return [(index, str(cuda.get_device_properties(index).uuid)) for index in devices]
        except (AttributeError, RuntimeError):  # half imported or without UUIDs; a device that has failed
            return None

    def device_memory(self) -> int:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            if cuda is None or not cuda.is_initialized():
                return 0
            return sum(cuda.memory_reserved(index) for index in range(cuda.device_count()))
        except (AttributeError, RuntimeError):  # half imported; a device that has failed
            return 0

    def reseed(self) -> None:
        # Of the CPU only: other devices' generators are made when the device is first used, which is after the fork.
        sys.modules["torch"].default_generator.seed()

    def set_threads(self, threads: int) -> None:
        sys.modules["torch"].set_num_threads(threads)

    def modes(self) -> Any:
        torch: Any = sys.modules["torch"]
        try:
            enabled = [torch.is_autocast_enabled(device) for device in _AUTOCAST]
            return torch.is_grad_enabled(), enabled, _autocast_depth(torch)
        except AttributeError:  # half imported
            return None

    def must_return(self, frame: FrameType) -> bool:
        # DDP's reducer counts the gradients that are ready, and calls the process group as soon as a bucket is full. An exception of
        # the group would leave its counts as they are in the middle of the pass, and DDP refuses the next one. The reducer bears
        # an exception at the end alone, where it waits for the buckets' futures. An exception in a future's search for tensors would
        # reach the user as a RuntimeError of pybind11's.
        at: FrameType | None = frame
        called_by_cpp = False
        while at is not None:
            code = at.f_code
            if any(part in code.co_filename for part in _CALLED_BY_CPP):
                if code.co_name == "wait":  # of FSDP's hooks, in Python
                    return False
                called_by_cpp = True
            elif code.co_name == _BACKWARD and code.co_filename.endswith(_GRAPH):
                # Without a frame within, C++ may be between two calls of the group: it looks for signals, too.
                return called_by_cpp or at is frame
            at = at.f_back
        return False

    def restore_modes(self, interrupt: BaseException, modes: Any) -> None:
        if not any(
            frame.f_code.co_filename.endswith(_SWITCHES)
            for frame, _ in traceback.walk_tb(interrupt.__traceback__)
        ):
            return
        torch: Any = sys.modules["torch"]
        gradients, autocast, depth = modes or (True, [False] * len(_AUTOCAST), 0)
        torch.set_grad_enabled(gradients)
        for device, enabled in zip(_AUTOCAST, autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
        # Weights that autocast has cast stay in its cache until the outermost context ends: with one that never has, all later steps
        # would compute with the weights of now.
        while _autocast_depth(torch) > depth:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _autocast_depth(torch: Any) -> int:
    """Return in how many autocast contexts the calling thread is."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _tracked_instances(base: type) -> list[Any]:
    """Return the instances of a type, and of those derived from it, that the garbage collector tracks.

    The list of all objects refers also to tuples that other threads are still filling. ``tuple(...)`` of a generator raises
    SystemError if another object refers to its result when it is full. So that list exists only inside of one call into C,
    during which no other thread runs, and nothing keeps a part of it: ``tee`` would keep itself, as it is among the objects.
    """
    return list(_instances(chain.from_iterable(map(gc.get_objects, (None,))), base))


def _instances(objects: Iterator[Any], base: type) -> Iterator[Any]:
    """Return an iterator over the instances of a type among objects that runs no Python code."""
    twice = chain.from_iterable(map(repeat, objects, repeat(2)))  # one for the result, one for its type
    return compress(twice, map(issubclass, map(type, twice), repeat(base)))


def _of_tensor(tensor: Any) -> ArraySource | None:
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    plain = tensor.detach()
    if tensor.is_quantized:
        plain = plain.int_repr()
    plain = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)

    def read(offset: int, length: int) -> Bytes:
        part: Bytes = raw[offset : offset + length].cpu().numpy()
        return part

    nbytes = int(raw.numel())
    return ArraySource(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        str(tensor.device),
        bool(tensor.requires_grad),
        nbytes,
        max(1, int(plain.element_size())),
        read,
        TensorOnDevice(raw, plain) if _works_on(tensor.device) and nbytes >= fingerprints.LEAST else None,
    )


def _works_on(device: Any) -> bool:
    """Return whether facts about elements are computed on this device, and not on the host."""
    return bool(device.type == "cuda")


class TensorOnDevice:
    """A :class:`~hvdlab.bindings.framework_hooks.DeviceInspector`. If the device's memory is full, blocks are computed on the host, in the same way.

    Args:
        raw: The bytes, in one dimension.
        elements: The same memory as elements.
    """

    def __init__(self, raw: Any, elements: Any) -> None:
        self._raw, self._elements = raw, elements

    def fingerprints(self) -> bytes:
        return fingerprints.fingerprints(self._worked_out(self._sums))

    def not_finite(self) -> tuple[int, int] | None:
        torch: Any = sys.modules["torch"]
        if self._elements.dtype not in {getattr(torch, name) for name in _FLOATING}:
            return None
        nans, infs = self._worked_out(self._odd).tolist()
        return nans, infs

    def _worked_out(self, work: Callable[[Any], Any]) -> Any:
        torch: Any = sys.modules["torch"]
        try:
            return work(self._raw.device).cpu().numpy()
        except torch.cuda.OutOfMemoryError:
            return work(torch.device("cpu")).numpy()

    def _sums(self, device: Any) -> Any:
        """Return a row of sums for each block. All memory that it needs is allocated once, about 20 MiB."""
        torch: Any = sys.modules["torch"]
        rows, columns, sets = fingerprints.ROWS, fingerprints.COLUMNS, fingerprints.SETS
        # A copy: torch warns of read-only arrays, and this one is read-only since all callers share it.
        weights = torch.from_numpy(fingerprints.weights(rows, columns).copy()).to(device)
        of_words, of_halves = weights[:, :columns], weights[:, columns:]
        parts = self._raw.split(fingerprints.BLOCK)
        block = torch.empty(fingerprints.BLOCK, dtype=torch.uint8, device=device)
        words = torch.empty((rows, columns), dtype=torch.int64, device=device)
        products = torch.empty_like(words)
        of_rows = torch.empty((sets, rows), dtype=torch.int64, device=device)
        sums = torch.empty((len(parts), sets), dtype=torch.int64, device=device)
        for number, part in enumerate(parts):
            block[: part.numel()].copy_(part)  # wherever a tensor begins, a block's words are aligned
            block[part.numel() :].zero_()
            words.copy_(block.view(torch.int32).view(rows, columns))
            for one in range(sets):
                torch.mul(words, of_words[one], out=products)
                torch.sum(products, 1, out=of_rows[one])
            halves = torch.cat((of_rows & 0xFFFFFFFF, of_rows >> 32), 1)
            torch.sum(halves * of_halves, 1, out=sums[number])
        return sums

    def _odd(self, device: Any) -> Any:
        """Return how many elements are NaN, and how many infinite."""
        torch: Any = sys.modules["torch"]
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        # In parts: each step makes masks of a byte for each element, on a device that is perhaps nearly full.
        for part in self._elements.split(max(1, fingerprints.BLOCK // self._elements.element_size())):
            here = part.to(device)
            nans = here.isnan().sum()
            counts += torch.stack((nans, here.isfinite().logical_not().sum() - nans))
        return counts


def _of_storage(storage: Any) -> ArraySource | None:
    torch: Any = sys.modules["torch"]
    if storage.device.type == "meta":
        return None
    return _of_tensor(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


def _module(value: Any) -> Iterable[Part]:
    """Yield parameters and buffers under the names that ``state_dict`` has, then the other modules, then all other attributes."""
    # Past the attribute access of the class, which can be code of the user's.
    inside = object.__getattribute__(value, "__dict__")
    found: list[Part] = []
    for group in ("_parameters", "_buffers", "_modules"):
        held = {name: item for name, item in dict(inside.get(group) or {}).items() if item is not None}
        found += [(f".{name}", item) for name, item in held.items()]
        if len(held) > 1:
            # An optimizer's state and the names of unnamed gradients depend on this order.
            found.append((f" (order of {group.strip('_')})", ", ".join(held)))
    for name, item in inside.items():
        if "_hooks" in name and issubclass(type(item), dict):
            found += _by_number(name, item)
        elif name not in _MODULE_OWN and not (name == "_non_persistent_buffers_set" and not item):
            found.append((f".{name}", item))
    return found


def _by_number(name: str, hooks: Any) -> list[Part]:
    """Return hooks by their order: torch counts their keys for the whole process, so equal hooks of two ranks may differ in them."""
    return [(f".{name}[{number}]", hook) for number, hook in enumerate(dict.values(hooks))]


def _optimizer(value: Any) -> Iterable[Part]:
    """Yield parameters and settings of the groups, then the state of each parameter, by its number, then all other attributes."""
    groups = value.param_groups
    found: list[Part] = [
        (f".param_groups[{number}][{key!r}]", item)
        for number, group in enumerate(groups)
        for key, item in group.items()
    ]
    parameters = [parameter for group in groups for parameter in group["params"]]
    found += [
        (f".state[{number}]", value.state[p]) for number, p in enumerate(parameters) if p in value.state
    ]
    for name, item in object.__getattribute__(value, "__dict__").items():
        if "_hooks" in name and issubclass(type(item), dict):
            found += _by_number(name, item)
        elif not name.startswith("_") and name not in ("param_groups", "state"):
            found.append((f".{name}", item))
    return found


def _sparse(value: Any) -> Iterable[Part] | None:
    torch: Any = sys.modules["torch"]
    if value.layout is torch.sparse_coo:
        plain = value.detach().coalesce()
        return [(".shape", tuple(value.shape)), (".indices", plain.indices()), (".values", plain.values())]
    return None


def _is_its_bytes(tensor: Any) -> bool:
    """Return whether the bytes of a CPU tensor, with its type and shape, are all there is to it."""
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def make_tensor(raw: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """Return the tensor whose bytes an array has; it goes on to use them. Called by pickles."""
    import torch

    tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


HOOKS = TorchHooks()
