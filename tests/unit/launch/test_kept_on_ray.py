"""Pools that are kept on a Ray cluster, over a module in the place of Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.launch.kept import KeptJob
from hvdlab.ray import keeper

JOB = KeptJob("lives", 1, "cpu", "ray", 0.0, None, "1")


class FakeRay:
    """Module in the place of Ray; the cluster's list still has an actor that has ended.

    Attributes:
        exceptions, util: Ray's modules.
    """

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        not_connected = SimpleNamespace(is_connected=lambda: False)
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=not_connected),
            list_named_actors=lambda all_namespaces: [
                {"name": name, "namespace": keeper.NAMESPACE} for name in ("ended", "lives")
            ],
        )

    def is_initialized(self) -> bool:
        return True

    def get_actor(self, name: str, namespace: str) -> Any:
        if name == "ended":
            raise ValueError("Failed to look up actor with name 'ended'")
        describe = SimpleNamespace(options=lambda concurrency_group: SimpleNamespace(remote=lambda: JOB))
        return SimpleNamespace(describe=describe)

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, answer: Any) -> Any:
        return answer


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())  # type: ignore[arg-type]  # of which the keeper uses these


def test_actor_that_ends_while_pools_are_listed_is_left_out() -> None:
    assert keeper.RayKeeper().all() == [JOB]
