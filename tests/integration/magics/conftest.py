"""Fixtures of these tests."""

from __future__ import annotations

from support.fixtures.magics import notebook  # noqa: F401  # fixture
from support.jupyter.loop import jupyter_loop  # noqa: F401  # fixture
