"""The variables that users set: one table of what each is, which process reads it, and what it means."""

from hvdlab.collectives.knobs.reading import for_reader, read
from hvdlab.collectives.knobs.table import KNOBS, Knob, Reader

__all__ = ["KNOBS", "Knob", "Reader", "for_reader", "read"]
