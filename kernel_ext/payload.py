"""What all payloads have in common."""

from __future__ import annotations

import msgspec


class Payload(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of every payload."""
