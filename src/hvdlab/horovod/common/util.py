"""``horovod.common.util``: small helpers that scripts take from there. Their answers are about hvdlab."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdlab.collectives import basics

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
"""The frameworks that Horovod knows."""

_BINDINGS = {
    "torch": "hvdlab.torch",
    "tensorflow": "hvdlab.tensorflow",
    "keras": "hvdlab.keras",
    "mxnet": "hvdlab.mxnet",
}


# -- what there is ----------------------------------------------------------------------------------------------------


def get_ext_suffix() -> str:
    """Return the ending of compiled modules of this Python, such as ``.cpython-312-x86_64-linux-gnu.so``."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where a compiled module would be.

    Args:
        pkg_path: A file of the package.
        *args: Directories below the package's, and the module's name.
    """
    if not args:
        raise ValueError("get_extension_full_path needs the name of a module.")
    *directories, name = args
    return os.path.join(os.path.dirname(pkg_path), *directories, name + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Make sure that a framework's binding can be used. hvdlab's need no compiled module.

    Args:
        ext_name: The binding, such as ``horovod.torch``.
        ext_env_var: Variable that lets Horovod's installation fail where the binding can't be compiled; not used.
        pkg_path: A file of the package that would hold the compiled module.
        *args: Where it would be in there; only used for a module that is no binding of hvdlab's.

    Raises:
        ImportError: hvdlab has no such binding, or its framework is not installed.
    """
    framework = ext_name.rpartition(".")[2]
    if framework in _BINDINGS:
        if not extension_available(framework):
            raise ImportError(f"{ext_name} needs {framework}, which is not installed.")
    elif not os.path.exists(get_extension_full_path(pkg_path, *args)):
        raise ImportError(f"hvdlab has no {ext_name}; it has {', '.join(f'horovod.{b}' for b in _BINDINGS)}.")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether hvdlab has a binding of this framework, and the framework is installed.

    Args:
        ext_base_name: One of :data:`EXTENSIONS`.
        verbose: Whether to print the answer.
    """
    found = ext_base_name in _BINDINGS and importlib.util.find_spec(ext_base_name) is not None
    return _with_a_line(f"the binding of {ext_base_name} can be used", found, verbose)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether this framework sees a GPU of its own, and hvdlab has a binding of it. Imports the framework.

    Args:
        ext_base_name: Horovod's name of the framework's binding, such as ``torch``.
        verbose: Accepted for Horovod's sake; nothing is printed.
    """
    found = False
    if extension_available(ext_base_name):
        if ext_base_name == "torch":
            import torch

            found = torch.cuda.is_available()
        else:
            found = bool(importlib.import_module("tensorflow").config.list_physical_devices("GPU"))
    return _with_a_line(f"{ext_base_name} sees a GPU", found, verbose)


def mpi_built(verbose: bool = False) -> bool:
    """Return whether collectives can go through MPI in this process."""
    return _with_a_line("MPI can be used", basics.mpi_built(), verbose)


def gloo_built(verbose: bool = False) -> bool:
    """Return whether collectives can go through Gloo in this process."""
    return _with_a_line("Gloo can be used", basics.gloo_built(), verbose)


def nccl_built(verbose: bool = False) -> bool:
    """Return whether collectives can go through NCCL in this process."""
    return _with_a_line("NCCL can be used", basics.nccl_built(), verbose)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not supported."""
    return _with_a_line("DDL can be used", basics.ddl_built(), verbose)


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Intel's oneCCL is not supported."""
    return _with_a_line("oneCCL can be used", basics.ccl_built(), verbose)


def _with_a_line(what: str, found: bool, verbose: bool) -> bool:
    if verbose:
        print(f"hvdlab: {what}: {'yes' if found else 'no'}")
    return found


# -- versions ---------------------------------------------------------------------------------------------------------


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: hvdlab is compiled for no version of a framework, so every version fits."""


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is ``target`` or later.

    Args:
        ver: Any version.
        target: A version of three parts, such as ``1.10.0``.

    Raises:
        ValueError: They are no strings, or ``target`` has not three parts.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"Versions are compared as strings, not {ver!r} and {target!r}.")  # noqa: TRY004 (Horovod's)
    if len(target.split(".")) != 3:
        raise ValueError(f"The version to compare with has three parts, such as 1.10.0, not {target!r}.")
    from packaging.version import Version

    return Version(ver) >= Version(target)


# -- the rest ---------------------------------------------------------------------------------------------------------


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment for a ``with`` block. Those that are ``None`` are left alone."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return a function ``(op, average)`` that makes a reduction operator of Horovod's old and new arguments.

    Args:
        reduce_ops: Has ``Average`` and ``Sum``.

    Returns:
        The function. It raises ``ValueError`` if both arguments are given, and warns if ``average`` is.
    """

    def chosen(op: Any, average: bool | None) -> Any:
        """Return the reduction operator for Horovod's old and new arguments.

        Args:
            op: The operator; ``None`` if ``average`` chooses.
            average: Deprecated form: true for the average, false for the sum, ``None`` if not given.

        Raises:
            ValueError: Both were given.
        """
        if op is not None and average is not None:
            raise ValueError("op= replaces average=; give only op=.")
        if op is not None:
            return op
        if average is None:
            return reduce_ops.Average
        warnings.warn(
            "average= is deprecated; give op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=2
        )
        return reduce_ops.Average if average else reduce_ops.Sum

    return chosen


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is 1, 2, 4, 8, …

    Args:
        num_rank: The number.
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[Any]:
    """Return ``n`` consecutive parts of a list, the first ones longer by one where it doesn't divide evenly.

    Args:
        l: The list.
        n: Number of parts.
    """
    size, longer = divmod(len(l), n)
    starts = [part * size + min(part, longer) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Return whether ``for _ in x`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
