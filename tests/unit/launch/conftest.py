"""Fixtures of these tests."""

from __future__ import annotations

from support.fixtures.launch import surroundings  # noqa: F401  # fixtures
