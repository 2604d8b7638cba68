"""Fixtures of these tests."""

from __future__ import annotations

from support.fixtures.kernel_ext_pool import start_pool, surroundings  # noqa: F401  # fixtures
