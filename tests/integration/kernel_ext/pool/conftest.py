"""Fixtures of these tests."""

from __future__ import annotations

import pytest

from hvdlab.kernel_ext.notebook import pool
from support.fixtures.kernel_ext_pool import start_pool, surroundings  # noqa: F401  # fixtures
from support.patience import PATIENCE


@pytest.fixture(autouse=True)
def patient_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what ranks answer as long as a busy machine needs: without an answer a status has no state, and a view no values."""
    for name in ("ANSWER_WITHIN", "LOOK_WITHIN"):
        monkeypatch.setattr(pool, name, PATIENCE)
