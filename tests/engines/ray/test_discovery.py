"""hvdlab.ray.elastic.RayHostDiscovery: Ray's nodes as hosts with slots."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from hvdlab.launch.host_discovery import as_host_source
from hvdlab.ray.elastic import RayHostDiscovery


def test_slots_are_what_living_nodes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"alive": alive, "NodeManagerAddress": address, "Resources": resources}
        for alive, address, resources in (
            (True, "10.0.0.1", {"CPU": 8.0, "GPU": 4.0}),
            (True, "10.0.0.2", {"CPU": 7.0, "GPU": 1.0}),
            (True, "10.0.0.3", {"CPU": 1.0}),
            (True, "10.0.0.4", {"memory": 1e9}),
            (False, "10.0.0.5", {"CPU": 8.0, "GPU": 8.0}),
        )
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    for arguments, wanted in (
        ((), {"10.0.0.1": 8, "10.0.0.2": 7, "10.0.0.3": 1}),
        ((False, 2), {"10.0.0.1": 4, "10.0.0.2": 3}),
        ((True,), {"10.0.0.1": 4, "10.0.0.2": 1}),
        ((True, 4, 1), {"10.0.0.1": 2, "10.0.0.2": 1}),
        ((True, 1, 2), {"10.0.0.1": 2}),
    ):
        assert RayHostDiscovery(*arguments).find_available_hosts_and_slots() == wanted


def test_the_nodes_of_a_cluster(cluster: Any) -> None:
    source = as_host_source(RayHostDiscovery(cpus_per_slot=3))
    assert list(source.find().values()) == [2]  # both nodes have one address
    assert list(RayHostDiscovery(use_gpu=True).find().values()) == [4]
