"""The hierarchical plane: shared memory within each host, another plane between the hosts.

``topology``  hosts, columns, and which members carry data between hosts
``gathering`` where the pieces of an allgather end up
``routing``   how the pieces of an alltoall travel
``plane``     the operations, composed of those of the inner and the outer plane

In :mod:`hvdlab.collectives.planes`: ``parts``, the planes that it is made of; ``segment``, memory that the members of one host make
for themselves; ``scoped``, a part of the rendezvous store.
"""

from hvdlab.collectives.planes.hierarchical.plane import HierarchicalPlane

__all__ = ["HierarchicalPlane"]
