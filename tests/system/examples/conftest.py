"""Shared fixtures of the tests of notebooks."""

from __future__ import annotations

from support.jupyter.loop import jupyter_loop  # noqa: F401  # fixture
