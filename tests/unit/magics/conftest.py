"""Fixtures of these tests."""

from __future__ import annotations

from support.fixtures.magics import jupyter_loop, notebook  # noqa: F401  # fixtures
