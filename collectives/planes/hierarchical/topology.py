"""Hosts and columns of a group.

::

                 host a   host b   host c
    column 0       0        3        6       each column is a group of the outer plane,
    column 1       1        4        7       each host a group of the inner one
                   2                         (no column: not every host has a third member)

There are as many columns as the smallest host has members; column ``c`` holds the ``c``-th member of each host. The
members in columns *carry*: only they talk to other hosts, each for a share of the data. Where all hosts have equally many
members, all members carry; where one host has a single member, only the first member of each host does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Where a member stands.

    Attributes:
        hosts: Positions of each host's members, in order; hosts are ordered by their first member.
        host: This member's host, as an index into ``hosts``.
        local: This member's index within its host.
        columns: Number of columns.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: int
    columns: int

    @classmethod
    def of(cls, hosts: Sequence[str], index: int) -> Topology:
        """The topology of the group whose members have these host keys, as seen from member ``index``."""
        by_host: dict[str, list[int]] = {}
        for position, key in enumerate(hosts):
            by_host.setdefault(key, []).append(position)
        groups = tuple(tuple(members) for members in by_host.values())
        host = list(by_host).index(hosts[index])
        return cls(groups, host, groups[host].index(index), min(len(members) for members in groups))

    @property
    def here(self) -> tuple[int, ...]:
        """Positions of this host's members."""
        return self.hosts[self.host]

    @property
    def even(self) -> bool:
        """Whether all hosts have equally many members, so that all members carry."""
        return all(len(members) == self.columns for members in self.hosts)

    @property
    def carries(self) -> bool:
        """Whether this member is in a column."""
        return self.local < self.columns

    def column(self, number: int) -> tuple[int, ...]:
        """Positions of a column's members, by host."""
        return tuple(members[number] for members in self.hosts)

    def served(self, column: int, host: int) -> tuple[int, ...]:
        """Positions of the members of ``host`` whose data travel in ``column``."""
        return self.hosts[host][column :: self.columns]

    def find(self, position: int) -> tuple[int, int]:
        """Host and index within the host of the member at ``position``."""
        for host, members in enumerate(self.hosts):
            if position in members:
                return host, members.index(position)
        raise ValueError(f"there is no member {position}")
