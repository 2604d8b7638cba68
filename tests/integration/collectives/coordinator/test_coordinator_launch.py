"""Users' variables reach the coordinator."""

from __future__ import annotations

import pytest

from hvdlab.collectives.autotune import TuningOptions
from hvdlab.collectives.coordinator.process import CoordinatorLaunch, settings_from, state_options
from hvdlab.collectives.errors import InvalidRequestError


def test_variables_become_settings() -> None:
    environ = {
        "HOROVOD_FUSION_THRESHOLD": "1048576",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2.5",
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_TIMELINE": "a rank reads it",
        "PATH": "x",
    }
    assert settings_from(environ) == {
        "fusion_threshold": 1048576,
        "stall_seconds": 2.5,
        "flush_delay": 0.0035,
    }


def test_unset_and_empty_variables_say_nothing() -> None:
    assert settings_from({"HOROVOD_FUSION_THRESHOLD": ""}) == {}


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"HOROVOD_FUSION_THRESHOLD='{text}'"):
        settings_from({"HOROVOD_FUSION_THRESHOLD": text})


def test_every_setting_reaches_the_state() -> None:
    launch = CoordinatorLaunch(
        "token", "other", "/", 1, size=3, fusion_threshold=5, flush_delay=0.25, separate_groups=True, stall_seconds=7.0,
        stall_shutdown=9.0, history_bytes=11, hierarchical_allreduce=True, hierarchical_allgather=False,
        autotune=True, autotune_warmup_samples=1, autotune_steps_per_sample=2, autotune_max_samples=3,
    )  # fmt: skip
    options = state_options(launch)
    assert (options.size, options.fusion_threshold, options.flush_delay) == (3, 5, 0.25)
    assert (options.separate_groups, options.history_bytes) == (True, 11)
    assert (options.stall_seconds, options.stall_shutdown) == (7.0, 9.0)
    assert (options.hierarchical_allreduce, options.hierarchical_allgather) == (True, False)
    assert options.tuning == TuningOptions(1, 2, 3)


def test_a_disabled_stall_check_neither_reports_nor_ends() -> None:
    options = state_options(
        CoordinatorLaunch("token", "other", "/", 1, stall_disable=True, stall_seconds=1.0, stall_shutdown=2.0)
    )
    assert (options.stall_seconds, options.stall_shutdown) == (0.0, 0.0)


def test_nothing_is_tuned_unless_asked() -> None:
    assert state_options(CoordinatorLaunch("token", "other", "/", 1)).tuning is None
