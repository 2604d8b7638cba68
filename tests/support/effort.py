"""How hard the random tests try: ``HVDLAB_TEST_EFFORT`` multiplies their number of examples (``make soak`` sets it)."""

from __future__ import annotations

import os


def examples(normal: int) -> int:
    """Return ``normal`` examples, times the effort that is asked for."""
    return normal * int(os.environ.get("HVDLAB_TEST_EFFORT", "1"))
