"""Pools that are kept on a Ray cluster, over a module in the place of Ray and a coordinator that does nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.launch.kept import KeepRequest, KeptJob, LeaseOwner
from hvdlab.ray import keeper
from hvdlab.ray.launcher import LaunchEnvironment
from support.patience import HOUR, PATIENCE

ONE, OTHER = LeaseOwner(7, 70, "a#1", "/work"), LeaseOwner(8, 80, "b#2", "/home")
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
            get_node_ip_address=lambda: "127.0.0.1",
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

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(current_actor=None)

    def kill(self, actor: Any) -> None:
        """Do nothing: the actor is an object of the test."""


class IdleCoordinator:
    """A process that waits for the end of its input.

    Attributes:
        respawned: The limits of the orders to start a successor.
    """

    address, tls_address = "unix:/none", "tls:127.0.0.1:1"
    token = certificate = client_token = "x"

    def __init__(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.pid = self._process.pid
        self.respawned: list[float] = []

    def ending(self) -> str:
        return ""

    def respawn(self, timeout: float, ranks: int | None) -> None:
        self.respawned.append(timeout)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())  # of which the keeper uses these


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleCoordinator]:
    made = IdleCoordinator()

    def refuse(address: str, token: str) -> None:
        raise StartError("no coordinator is there")

    monkeypatch.setattr(keeper, "CoordinatorProcess", SimpleNamespace(start=lambda **options: made))
    monkeypatch.setattr(keeper, "Client", SimpleNamespace(connect=refuse))
    starter = SimpleNamespace(close=lambda timeout: None)
    monkeypatch.setattr(keeper, "RayStarter", lambda *arguments: starter)
    yield made
    made.close()


def test_actor_that_ends_while_pools_are_listed_is_left_out() -> None:
    assert keeper.RayKeeper().all() == [JOB]


def test_process_that_lost_the_pool_replaces_no_coordinator(coordinator: IdleCoordinator) -> None:
    request = KeepRequest("pool", 1, "cpu", "module", {}, ("unowned", b""), ONE)
    actor = keeper.PoolActor(request, LaunchEnvironment("/", {}), HOUR)
    first = actor.claim(ONE)
    assert isinstance(first, keeper.ClaimGranted)
    second = actor.claim(OTHER, first.number)
    assert isinstance(second, keeper.ClaimGranted)
    try:
        with pytest.raises(StartError, match="uses the pool no more"):
            actor.replace_coordinator(first.number, first.incarnation, PATIENCE)
        assert coordinator.respawned == []
        assert actor.replace_coordinator(second.number, second.incarnation, PATIENCE) == 1
        assert coordinator.respawned == [PATIENCE]
    finally:
        actor.end(second.number)
