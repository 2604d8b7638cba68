"""The same scripts on MXNet's stores, with real servers where they are distributed, and on hvdlab's: results are equal to the bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.mxnet import store_scripts
from engines.mxnet.real_servers import played_by_mxnet
from hvdlab import kvstore
from support.ranks.resident import Ranks


@dataclass(frozen=True)
class Case:
    """Scripts for one store.

    Attributes:
        store: Its name.
        scripts: They run on one store, one after the other.
        servers: How many MXNet has.
        env: Settings of MXNet's processes, and of hvdlab's.
    """

    store: str
    scripts: Sequence[str]
    servers: int = 1
    env: dict[str, str] = field(default_factory=dict)


CASES = [
    Case("dist_sync", ["sums", "ways_to_push", "optimizers", "refused"]),
    Case(
        "dist_device_sync",
        ["sums", "ways_to_push", "large_values", "half_precision"],
        2,
        {"MXNET_KVSTORE_BIGARRAY_BOUND": "100"},
    ),
    Case("dist_sync", ["schedules"]),
    Case("dist_sync", ["half_precision_by_default"]),
    Case("dist_sync", ["compressed"], 2, {"MXNET_KVSTORE_BIGARRAY_BOUND": "100"}),
    Case("dist", ["names"]),
    Case("dist_async", ["turns", "counting"], 2, {"MXNET_KVSTORE_BIGARRAY_BOUND": "20"}),
]


def play(store: str, names: list[str]) -> list[Any]:
    kv = kvstore.create(store)
    return [getattr(store_scripts, name)(kv, store_scripts.Hvdlab()) for name in names]


def play_installed(store: str, names: list[str]) -> list[Any]:
    """The same with MXNet's arrays and optimizers on the store that MXNet makes once ours are installed."""
    sys.path.insert(0, str(Path(__file__).parent))
    import gluon_scripts  # type: ignore[import-not-found]  # mypy knows it as engines.mxnet.gluon_scripts
    import mxnet as mx

    import hvdlab.mxnet as hvd

    hvd.install_kvstore()
    try:
        kv = mx.kv.create(store)
        assert isinstance(kv, kvstore.KVStore)
        scripts = {**vars(store_scripts), **vars(gluon_scripts)}
        return [scripts[name](kv, store_scripts.Mxnet()) for name in names]
    finally:
        hvd.uninstall_kvstore()


def start_servers() -> None:
    """Start the servers. They live as long as the ranks, so they have to come before the first script."""
    kvstore.create("dist_async")


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case.store, case.scripts[-1]]))
def test_workers_see_the_same(case: Case) -> None:
    theirs = played_by_mxnet(case.store, case.scripts, servers=case.servers, env=case.env)
    with Ranks(2, env=case.env) as ranks:
        ranks.run(start_servers, timeout=60)
        ours = ranks.run(play, case.store, list(case.scripts), timeout=100)
    for rank in (0, 1):
        for name, mine, other in zip(case.scripts, ours[rank], theirs[rank], strict=True):
            compare(f"{name} on rank {rank}", mine, other)


GLUON = ["mxnets_optimizers", "trainer_on_the_store", "trainer_itself"]
"""Scripts in MXNet's own words; each on a store of its own, since a trainer's keys are numbers from 0 on."""
PLAYS = 4
"""On a busy machine MXNet's own workers sometimes train otherwise from the second step on, in one of two runs: so often they may."""


@pytest.mark.filterwarnings("ignore")  # MXNet's
@pytest.mark.parametrize("script", GLUON)
def test_scripts_of_mxnets_own_see_the_same_once_our_stores_are_installed(script: str) -> None:
    with Ranks(2) as ranks:
        ours = [results for (results,) in ranks.run(play_installed, "dist_sync", [script], timeout=100)]
    theirs: list[Any] = []
    for _ in range(PLAYS):
        theirs = [results for (results,) in played_by_mxnet("dist_sync", [script])]
        if theirs == ours:
            break
    for rank in (0, 1):
        compare(f"{script} on rank {rank}", ours[rank], theirs[rank])


@pytest.mark.filterwarnings("ignore")  # MXNet's
@pytest.mark.parametrize("script", store_scripts.ALONE, ids=lambda script: script.__name__)
def test_one_process_sees_the_same(script: Callable[[Any, Any], Any]) -> None:
    compare(script.__name__, script(None, store_scripts.Hvdlab()), script(None, store_scripts.Mxnet()))


def compare(where: str, ours: list[Any], theirs: list[Any]) -> None:
    different = [
        f"{number}: {mine[:-1]} {_short(mine[-1])} != {other[:-1]} {_short(other[-1])}"
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        if mine != other
    ]
    assert not different, f"{where}: {len(different)} of {len(ours)} differ:\n" + "\n".join(different[:12])


def _short(value: Any) -> str:
    return str(value[:16]) if isinstance(value, bytes) else str(value)
