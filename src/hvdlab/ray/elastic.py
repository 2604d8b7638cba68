"""Ray's nodes as hosts of an elastic job."""

from __future__ import annotations

from hvdlab.launch.host_source import HostDiscovery
from hvdlab.ray.strategy import imported


class RayHostDiscovery(HostDiscovery):
    """The nodes of the Ray cluster to which this process is connected, by address, each with the ranks that it has room for.

    It counts what nodes have, not what is free on them. ``hvdlab.run(fn, host_discovery_script=RayHostDiscovery(), min_np=2)``
    starts ranks there by ssh.

    Args:
        use_gpu: Whether a rank takes GPUs.
        cpus_per_slot: Ray's CPUs of a rank.
        gpus_per_slot: GPUs of a rank, with ``use_gpu``.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Hosts with room for a rank at least.

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
