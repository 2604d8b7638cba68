"""The hierarchical plane: shared memory within each host, another plane between the hosts.

``topology``  hosts, columns and who carries what between hosts
``memory``    a segment that the members of one host make for themselves
``parts``     the planes that it is made of
``scoped``    a part of the rendezvous store
``gathering`` where the pieces of an allgather end up
``routing``   how the pieces of an alltoall travel
``plane``     the operations, composed of those of the inner and the outer plane
"""

from hvdlab.collectives.planes.hierarchical.plane import HierarchicalPlane

__all__ = ["HierarchicalPlane"]
