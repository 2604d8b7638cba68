"""Creation of process groups: ``dist.init_process_group`` in a pool and under ``hvdlab run``, and torch's calls for a new group.

The ranks of the default group meet in the world that is already there.

They meet by a collective, so that each event that ends a collective ends this wait, too: an error names a rank that fails, ends its cell or
dies without coming, and Ctrl-C has an effect at once.
"""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import CauseKind, HvdlabError
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.text import call_site
from hvdlab.collectives.types import DType, OpKind
from hvdlab.torch.c10d.call_history import keep_errors
from hvdlab.torch.c10d.operation_names import renamed
from hvdlab.torch.c10d.process_group import HvdlabProcessGroup
from hvdlab.torch.c10d.store import HvdlabStore
from hvdlab.torch.c10d.watch_options import WatchOptions
from hvdlab.torch.c10d.world import (
    C10dWorld,
    current_world,
    has_coordinator,
    require_whole_world,
    world_of_group,
)

_SPACE_BYTES = 16
"""Random bytes from which the name of a store's space is made."""


def init_process_group(backend: str, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """Replace ``dist.init_process_group`` in a process that may be a rank of hvdlab's world.

    Args:
        backend: The name under which hvdlab is known to torch.
        original: Torch's own function. It does everything by itself, unless hvdlab makes the group, or the group is made with
            ``enable_reconfigure=True``, and the user named no store.
        args, kwargs: Its arguments.

    Raises:
        AbortedError: A rank failed, died, was interrupted, or ended its cell without calling it; the world goes on.
        InvalidRequestError: The rank or size is not that of the world.
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    in_pool = context.in_rank_of_pool()
    in_world = in_pool or has_coordinator(Settings.from_env())
    if in_world and _is_wanted_for_cpu() and given.get("backend") in (None, "gloo", "cpu:gloo"):
        given["backend"] = backend
        if context.init().rank == 0:
            print("torch.distributed: this group is hvdlab's in place of Gloo's (HVDLAB_C10D=1).")
    if in_pool and dist.is_initialized() and _is_ours(given, backend) and _stays():
        return
    if (
        _is_ours(given, backend)
        and "cuda:nccl" in str(given["backend"]).lower()
        and given.get("pg_options") is None
    ):
        # Torch asks one backend alone for a group that Python makes, the first one: so NCCL goes inside.
        given["pg_options"] = WatchOptions("watched", "nccl")
    named_store = given.get("store") is not None or given.get("init_method") not in (None, "env://")
    # A group that is to be repaired needs a store that outlives what befalls it, and the ranks have to meet before its first use.
    meets_here = _is_ours(given, backend) or given.get("enable_reconfigure", False)
    if named_store or not meets_here or not has_coordinator(Settings.from_env()) or dist.is_initialized():
        original(**given)
        return
    engine = context.init()
    require_whole_world(engine, given.get("rank", -1), given.get("world_size", -1))
    timeout = given.get("timeout") or dist.distributed_c10d.default_pg_timeout
    engine.acknowledge_losses()  # the group is one of the ranks that live
    world = context.companion(C10dWorld)  # before the ranks meet: after that, others may send mail to it
    space = _met(engine, timeout)
    ranks = engine.ranks()
    world.store = HvdlabStore(world.link, space, ranks, timeout)
    # The other ranks need not wait for this: the keeper accepts requests for a space that is not open yet.
    if engine.rank == ranks[0]:
        world.store.open()
    # torch refuses it beside a store.
    given.pop("init_method", None)
    original(**{**given, "store": world.store, "rank": ranks.index(engine.rank), "world_size": len(ranks)})


def _is_ours(given: dict[str, Any], backend: str) -> bool:
    return backend in str(given.get("backend", "")).lower()


def _is_wanted_for_cpu() -> bool:
    """Return whether the user asks for hvdlab's groups in place of Gloo's, by ``HVDLAB_C10D=1``.

    Not on a machine with an accelerator, where torch's default group is for the accelerator's tensors, too.
    """
    return os.environ.get("HVDLAB_C10D", "0") == "1" and torch.accelerator.current_accelerator() is None


def _stays() -> bool:
    """Return whether the present default group stays, because its ranks are still the same processes; the first rank prints which.

    If it does not stay, end it here, with all groups that were made from it. A group that is not hvdlab's is left alone.
    """
    group: Any = dist.group.WORLD
    if not isinstance(group, HvdlabProcessGroup):
        return False
    engine = context.init()
    stays = group.has_its_ranks() and group.size() == len(engine.ranks())
    if engine.rank == engine.ranks()[0]:
        if stays:
            print(
                f"torch.distributed: the default process group of {group.size()} ranks is there already; "
                "dist.destroy_process_group() ends it."
            )
        else:
            print(
                f"torch.distributed: the default process group of {group.size()} ranks has other ranks now, and is made anew with "
                f"{len(engine.ranks())}; make other groups and wrap models again."
            )
    if not stays:
        dist.destroy_process_group()
    return stays


def _met(engine: Engine, timeout: timedelta) -> str:
    """Wait for all ranks; returns the name of the store's space for this default group, which the first rank draws at random."""
    # A copy, since the broadcast writes to it, and memory of ``bytes`` is read-only.
    space = np.frombuffer(os.urandom(_SPACE_BYTES), np.uint8).copy()
    request = Request(
        OpKind.BROADCAST,
        "init_process_group",
        input=space,
        output=space,
        dtype=DType.U8,
        # The lowest rank that lives: rank 0 may be gone.
        root=engine.ranks()[0],
        site=call_site(3),
    )
    seconds = timeout.total_seconds()
    try:
        handle = engine.submit(request)
        try:
            handle.wait(seconds)
        except TimeoutError:
            text = f"rank {engine.rank} gave up after {seconds:g} s, the timeout of the process group"
            engine.withdraw(text, 0, CauseKind.TIMEOUT)
            # Without a limit: the withdrawal ends it on all ranks, and its error names those that have not
            # come.
            handle.wait()
    except HvdlabError as error:
        raise renamed(error, "init_process_group") from None
    return space.tobytes().hex()


def create(options: Any, watch: object = None) -> HvdlabProcessGroup:
    """Make a process group. Torch calls this on the group's members only, which wait for each other here.

    Args:
        watch: The user's ``pg_options``: :class:`WatchOptions`, or those of another backend, which count as none. A group without any has
            those of the default group.
        options: Torch's options: ``store``, ``group_rank``, ``group_size``, ``timeout``, ``group_id`` and
            ``global_ranks_in_group``, which is empty for the default group.

    Raises:
        InvalidRequestError: The default group has another rank or size than hvdlab's world.
        StartError, AbortedError: There is no coordinator, or a rank that is needed did not answer, died or failed.
    """
    keep_errors()
    numbers = options.global_ranks_in_group
    rank, size = options.group_rank, options.group_size
    world = current_world() if numbers else world_of_group(options.store, rank, size)
    chosen = watch if isinstance(watch, WatchOptions) else world.watch if numbers else WatchOptions()
    if not numbers:
        world.watch, world.ranks = chosen, world.engine.ranks()
    ranks = world.members(numbers) if numbers else world.ranks
    inner = chosen.inner_backend(options.store, rank, size)
    if not inner:
        return HvdlabProcessGroup(world, rank, size, options.group_id, ranks, options.timeout)
    from hvdlab.torch.c10d.watched import WatchedGroup

    return WatchedGroup(
        world, rank, size, options.group_id, ranks, options.timeout, options.store, inner, chosen.late
    )
