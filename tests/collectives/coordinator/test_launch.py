"""Horovod's variables reach the coordinator."""

from __future__ import annotations

import pytest

from hvdlab.collectives.coordinator.launch import settings_from
from hvdlab.collectives.errors import InvalidRequestError


def test_variables_become_settings() -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1048576", "HOROVOD_STALL_CHECK_TIME_SECONDS": "2.5", "PATH": "x"}
    assert settings_from(environ) == {"fusion_threshold": 1048576, "stall_seconds": 2.5}


def test_unset_and_empty_variables_say_nothing() -> None:
    assert settings_from({"HOROVOD_FUSION_THRESHOLD": ""}) == {}


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"HOROVOD_FUSION_THRESHOLD='{text}'"):
        settings_from({"HOROVOD_FUSION_THRESHOLD": text})
