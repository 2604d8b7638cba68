"""Entry point ``torch.backends``, which ``import torch`` calls: makes the backend "hvdlab" known.

It costs well under a millisecond, as it imports nothing: all other modules are imported when a process group of this backend is made.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

NAME = "hvdlab"


def register() -> None:
    """Let ``dist.init_process_group("hvdlab")`` and ``dist.new_group(backend="hvdlab")`` make groups of hvdlab's.

    Does nothing if that was done, or if this torch was built without ``torch.distributed``.
    """
    module: Any = sys.modules.get("torch.distributed")
    backend: Any = getattr(module, "Backend", None)
    if backend is not None and NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        ours = _through_world(module.init_process_group)
        module.init_process_group = module.distributed_c10d.init_process_group = ours
        monitored = _of_any_backend(module.monitored_barrier)
        module.monitored_barrier = module.distributed_c10d.monitored_barrier = monitored
        c10d = module.distributed_c10d
        if hasattr(c10d, "_set_pg_timeout"):
            c10d._set_pg_timeout = _for_any_backend(c10d._set_pg_timeout)


def _through_world(original: Any) -> Any:
    """Return an ``init_process_group`` that needs none of torch's stores in an existing world.

    Torch asks a backend for a group only after its own rendezvous, where rank 0 would wait in C++ for the other ranks. It
    has no other place to come in before that.
    """

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if "HVDLAB_COORDINATOR" in os.environ or "hvdlab.collectives.context" in sys.modules:
            from hvdlab.torch.c10d.rendezvous import init_process_group

            init_process_group(NAME, original, *args, **kwargs)
        else:
            original(*args, **kwargs)

    return init_process_group


def _of_any_backend(original: Any) -> Any:
    """Return a ``monitored_barrier`` for all backends: torch's own refuses all but Gloo before it asks them."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = sys.modules["torch.distributed"].group.WORLD if group is None else group
        if type(chosen).__module__.startswith("hvdlab."):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    return monitored_barrier


def _for_any_backend(original: Any) -> Any:
    """Return a ``_set_pg_timeout`` for all backends: torch's own only warns if a group is neither of Gloo nor of NCCL."""

    @functools.wraps(original)
    def set_pg_timeout(timeout: Any, group: Any = None) -> None:
        chosen = sys.modules["torch.distributed"].group.WORLD if group is None else group
        if type(chosen).__module__.startswith("hvdlab."):
            chosen.set_timeout(timeout)
        else:
            original(timeout, group)

    return set_pg_timeout


def _create(options: Any, watch: object) -> Any:
    """Create a group for torch. Only now are other modules of hvdlab's imported."""
    from hvdlab.torch.c10d.rendezvous import create

    return create(options, watch)
