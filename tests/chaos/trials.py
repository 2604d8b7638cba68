"""How each kind of fault is played, and judged."""

from __future__ import annotations

from chaos.interrupts import Interrupts
from chaos.owners import Owners
from chaos.parts import Parts
from chaos.ranks import Ranks
from chaos.resizing import Resizing
from chaos.scarcity import Scarcity


class Trial(Ranks, Interrupts, Parts, Owners, Scarcity, Resizing):
    """One fault, from the beginning of a cell to the next collective. Made by :meth:`Campaign.trial`."""
