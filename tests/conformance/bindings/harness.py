"""Descriptions of bindings for the conformance suite. A new one brings a subclass, and its name in ``BINDINGS``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import errors
from hvdlab.collectives.types import DType

Values = npt.NDArray[Any]

BINDINGS = {
    name: f"conformance.bindings.{name}_binding"
    for name, package in {
        "torch": "torch",
        "numpy": "numpy",
        "gpu": "numpy",
        "tensorflow": "tensorflow",
        "mxnet": "mxnet",
    }.items()
    if find_spec(package) is not None
}
"""Modules that have a ``BINDING``. MXNet is in an environment of its own, where some of the others are not."""

ONLY_IN_RANKS = frozenset({"tensorflow", "mxnet", "gpu"})
"""Bindings that the process of the tests itself never imports: their frameworks start threads, and cost much to import, or replace a GPU."""

SIZES = (1, 3)
"""Worlds that every binding is tried in."""


class BindingUnderTest(ABC):
    """One framework.

    Attributes:
        module: Name of the module that users import as ``hvd``.
        lacks: Features that it does not have, of ``average`` and ``compression`` (the arguments), ``adasum``,
            ``gradients``, ``async`` and ``in place`` (the forms).
        scalars_are_rows: Whether a 0-d tensor counts as one row in reducescatter and alltoall, instead of being refused.
        dtypes: Element types that its tensors have.
        not_a_tensor: A value that it does not accept, and the text of the refusal after the name of the collective.
    """

    module: str
    lacks: frozenset[str] = frozenset()
    scalars_are_rows = False
    dtypes: tuple[DType, ...] = tuple(DType)
    not_a_tensor: tuple[Any, str]

    @property
    def hvd(self) -> Any:
        return import_module(self.module)

    @abstractmethod
    def tensor(self, values: Values, dtype: DType) -> Any:
        """Return a tensor of these whole numbers."""

    @abstractmethod
    def values(self, tensor: Any) -> Values:
        """Return the numbers in a tensor, as an array of its shape, of float64."""

    @abstractmethod
    def dtype(self, tensor: Any) -> DType:
        """Return the element type of a tensor."""

    def counts(self, received: Any) -> list[int]:
        """Return alltoall's counts of the rows that each rank has sent."""
        return [int(count) for count in received]

    @abstractmethod
    def layouts(self, values: Values) -> dict[str, Any]:
        """Return float32 tensors of these values (of two dimensions) that the core can't work on as they lie in
        memory."""

    @abstractmethod
    def unsupported(self) -> dict[str, tuple[Any, str]]:
        """Return tensors whose elements can't be sent, and a part of the text with the advice."""

    @abstractmethod
    def gradients(
        self, function: Callable[..., Any], tensors: list[Any], weights: list[Values]
    ) -> list[Values]:
        """Return the gradients of the sum of ``weights`` times the results of ``function(*tensors)``, for each
        tensor."""


def binding(name: str) -> BindingUnderTest:
    found: BindingUnderTest = import_module(BINDINGS[name]).BINDING
    return found


class Problems(list[str]):
    """Errors of this rank. The other cases are tried all the same, so that no rank waits for this one."""

    def expect(self, condition: bool, case: object) -> None:
        if not condition:
            self.append(f"{case}")

    @contextmanager
    def of(self, case: object) -> Iterator[None]:
        """Record any exception as a problem of this case."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the test shows it
            self.append(f"{case}: {type(error).__name__}: {error}")

    @contextmanager
    def refused(self, case: object, kind: type[Exception], text: str) -> Iterator[None]:
        """Check that this case raises an error of exactly this class, whose text has this part."""
        try:
            yield
        except kind as error:
            if class_of(error) is not kind or text not in str(error):
                self.append(f"{case}: expected {kind.__name__} with {text!r}, got {error!r}")
        except Exception as error:  # noqa: BLE001
            self.append(f"{case}: expected {kind.__name__}, got {error!r}")
        else:
            self.append(f"{case}: nothing was raised")


def class_of(error: Exception) -> type:
    """Return its class in the core's tree of errors; a binding may derive others, which are its framework's, too."""
    tree = (kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(tree, type(error))


def values_of(rank: int, shape: tuple[int, ...], seed: int = 0) -> Values:
    """Return a rank's contribution: small whole numbers, so that every dtype holds sums and products exactly."""
    return np.random.default_rng((seed, rank)).integers(0, 4, shape).astype(np.float64)
