"""Ray's nodes as hosts of an elastic job."""

from __future__ import annotations

from hvdlab.launch.host_discovery import HostDiscovery
from hvdlab.ray.strategy import imported


class RayHostDiscovery(HostDiscovery):
    """The nodes of the Ray cluster to which this process is connected, by address, each with the ranks that it has room for.

    Slots are counted from all resources of the nodes, not from the free ones. ``hvdlab.run(fn, host_discovery_script=RayHostDiscovery(), min_np=2)``
    starts ranks there by ssh.

    Args:
        use_gpu: Whether a rank uses GPUs.
        cpus_per_slot: Ray's CPUs of a rank.
        gpus_per_slot: GPUs of a rank, with ``use_gpu``.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts with room for a rank at least.

        Raises:
            StartError: Ray is missing.
            ray.exceptions.RaySystemError: This process is not connected to Ray.
        """
        hosts: dict[str, int] = {}
        for node in imported().nodes():
            if not node["alive"]:
                continue
            resources = node["Resources"]
            slots = int(resources.get("CPU", 0) // self.cpus_per_slot)
            if self.use_gpu:
                slots = min(slots, int(resources.get("GPU", 0) // self.gpus_per_slot))
            if slots:
                address = node["NodeManagerAddress"]
                hosts[address] = hosts.get(address, 0) + slots
        return hosts


def node_names() -> dict[str, str]:
    """Return the ids of the nodes that live, by name: a node's address, and enough of its id to distinguish nodes of one address."""
    found = {}
    for node in imported().nodes():
        if node["Alive"]:
            address = str(node["NodeManagerAddress"]).replace(":", "-").strip("-")
            found[f"{address}-{node['NodeID'][:8]}"] = str(node["NodeID"])
    return found


class RayNodes(HostDiscovery):
    """Host source of Ray's nodes, under names of :func:`node_names`, each with the ranks that it has room for.

    Args:
        cpus_per_worker: Ray's CPUs of a rank.
        gpus_per_worker: GPUs of a rank.
    """

    def __init__(self, cpus_per_worker: int = 1, gpus_per_worker: int = 0) -> None:
        self._cpus, self._gpus = cpus_per_worker, gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the nodes with room for a rank at least, whether or not it is free."""
        names = {node: name for name, node in node_names().items()}
        hosts = {}
        for node in imported().nodes():
            name, resources = names.get(node["NodeID"]), node["Resources"]
            wanted = {"CPU": self._cpus, "GPU": self._gpus}
            slots = min(int(resources.get(kind, 0) // each) for kind, each in wanted.items() if each)
            if name is not None and slots:
                hosts[name] = slots
        return hosts
