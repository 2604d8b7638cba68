"""The hierarchical plane: shared memory within each host, another plane between the hosts.

``routing``  hosts and columns, which members carry data between hosts, and the routes of allgathers and alltoalls
``plane``    the operations, composed of those of the inner and the outer plane

In :mod:`hvdlab.collectives.planes`: ``subgroups``, the planes that it is made of; ``segment``, memory that the members of one host make
for themselves; ``scoped``, a part of the rendezvous store.
"""

from hvdlab.collectives.planes.hierarchical.plane import HierarchicalPlane

__all__ = ["HierarchicalPlane"]
