"""Parameters and Python objects, from one rank to all or from all to all."""

from __future__ import annotations

from typing import Any

import mxnet as mx  # pyright: ignore[reportMissingImports]

from hvdlab.bindings.arguments import broadcasting
from hvdlab.bindings.handles import wait_for_all
from hvdlab.bindings.objects import allgather_object, broadcast_object
from hvdlab.collectives.basics import size
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import GLOBAL_ID
from hvdlab.mxnet.adapter import BINDING

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters on all ranks with those of ``root_rank``, in place. Every rank calls it.

    A parameter whose shape is not known yet is broadcast right after its initialisation, on all ranks. In a world of one
    nothing happens.

    Args:
        params: A dict of arrays or Gluon parameters, or a ``ParameterDict``, such as ``Block.collect_params()`` or
            ``Module.get_params()[0]``.
        root_rank: The rank they come from.
        prefix: Goes before the names, which keeps several calls apart.

    Raises:
        InvalidRequestError: ``params`` is none of these (a ``ValueError``).
        AssertionError: ``prefix`` is not a str.
        MismatchError: Shapes or types differ between ranks.
        AbortedError: A rank died, failed, left or was interrupted; some parameters may have been overwritten.
    """
    assert prefix is None or isinstance(prefix, str), f"prefix must be a str, not {type(prefix).__name__}"
    if not isinstance(params, dict | mx.gluon.ParameterDict):
        raise InvalidRequestError(
            f"broadcast_parameters takes a dict or ParameterDict, not {type(params).__name__}."
        )
    if size() == 1:
        return
    operation = broadcasting(root_rank, GLOBAL_ID)
    known: list[tuple[str, list[Any]]] = []
    for key, parameter in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        try:
            known.append((name, _copies(parameter)))
        except mx.gluon.parameter.DeferredInitializationError:
            _broadcast_when_initialised(parameter, root_rank, name)
    wait_for_all([BINDING.submit(operation, copies[0], name, in_place=True) for name, copies in known])
    for _, copies in known:
        _spread(copies)


def _copies(parameter: Any) -> list[Any]:
    """Return the array of a parameter on each of its devices."""
    if not isinstance(parameter, mx.gluon.Parameter):
        return [parameter]
    copies: list[Any] = parameter.list_data()
    return copies


def _spread(copies: list[Any]) -> None:
    for copy in copies[1:]:
        copies[0].copyto(copy)


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str) -> None:
    initialise = parameter._init_impl

    def initialise_and_broadcast(*arguments: Any, **named: Any) -> None:
        initialise(*arguments, **named)
        del parameter._init_impl  # the class's own again: a later initialisation concerns only this rank
        copies = _copies(parameter)
        BINDING.run(broadcasting(root_rank, GLOBAL_ID), copies[0], name, in_place=True)
        _spread(copies)

    parameter._init_impl = initialise_and_broadcast
