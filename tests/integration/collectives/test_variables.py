"""The table of variables: it is true, and the documentation shows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from hvdlab.collectives.coordinator.process import CoordinatorLaunch
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.settings import (
    VARIABLES,
    EnvironmentVariable,
    Reader,
    Settings,
    read_variable,
    read_variables,
)
from support.page_scripts import load_script

SCRIPT = Path(__file__).parents[3] / "docs/reference/settings_table.py"
settings_table = load_script(SCRIPT, "settings_table")
LAUNCH = {field.name: field for field in msgspec.structs.fields(CoordinatorLaunch)}
SETTINGS = {field.name: field for field in dataclasses.fields(Settings)}


def test_the_documentation_shows_the_table() -> None:
    page = settings_table.PAGE.read_text()
    assert settings_table.filled(page) == page, "run python docs/reference/settings_table.py"


def test_every_variable_is_there_once() -> None:
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "variable", [variable for variable in VARIABLES if variable.field], ids=lambda variable: variable.name
)
def test_a_field_exists_and_has_the_default_that_is_written_down(variable: EnvironmentVariable) -> None:
    both = variable.reader is Reader.BOTH
    for reader, fields in ((Reader.COORDINATOR, LAUNCH), (Reader.RANK, SETTINGS)):
        if variable.reader is not reader and not both:
            continue
        default = fields[variable.field].default
        if variable.default == "-":
            assert not default
        else:
            assert default == variable.kind.parse(variable.default)


def test_all_that_is_wrong_is_said_at_once() -> None:
    environ = {
        "HOROVOD_CYCLE_TIME": "soon",
        "HOROVOD_CACHE_CAPACITY": "-1",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    with pytest.raises(InvalidRequestError) as caught:
        read_variables(environ)
    text = str(caught.value)
    assert "HOROVOD_CYCLE_TIME='soon': a number of milliseconds from 0 was expected" in text
    assert "HOROVOD_CACHE_CAPACITY='-1': a whole number from 0 was expected" in text
    assert "MARK_CYCLES" not in text


def test_one_variable_is_read_whatever_the_others_hold() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "soon", "HVDLAB_OUTPUT_HOLD": "2", "HVDLAB_OUTPUT_SHOWN": " "}
    assert read_variable("HVDLAB_OUTPUT_HOLD", environ) == 2.0
    assert read_variable("HVDLAB_OUTPUT_SHOWN", environ) is None
    assert read_variable("HVDLAB_OUTPUT_KEPT", environ) is None
    with pytest.raises(InvalidRequestError, match=r"^HOROVOD_CYCLE_TIME='soon': a number of milliseconds"):
        read_variable("HOROVOD_CYCLE_TIME", environ)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", True),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "off", False),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "0", False),
        ("HOROVOD_CYCLE_TIME", "2.5", 0.0025),
        ("HOROVOD_THREAD_AFFINITY", "0,3, 5", (0, 3, 5)),
        ("HOROVOD_LOG_LEVEL", "INFO", 20),
        ("HVDLAB_PLANE", "shm", "shm"),
        ("HVDLAB_CUDA_PLANE", "NCCL", "nccl"),
    ],
)
def test_texts_become_values(variable: str, text: str, value: object) -> None:
    assert read_variables({variable: text}) == {variable: value}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HOROVOD_TIMELINE_MARK_CYCLES", "perhaps"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "nan"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "-1"),
        ("HOROVOD_THREAD_AFFINITY", "0,x"),
        ("HOROVOD_LOG_LEVEL", "loud"),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "0"),
        ("HVDLAB_PLANE", "teleport"),
        ("HVDLAB_CUDA_PLANE", "rccl"),
    ],
)
def test_nonsense_is_refused(variable: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{variable}='{text}'"):
        read_variables({variable: text})


def test_a_plane_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(
        InvalidRequestError,
        match=r"^HVDLAB_PLANE='NCCL': NCCL moves CUDA tensors only.*; one of auto, shm, .* was expected\.$",
    ):
        read_variables({"HVDLAB_PLANE": "NCCL"})


def test_ranks_take_their_variables() -> None:
    settings = Settings.from_env(
        {
            "HOROVOD_TIMELINE": "/tmp/t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "7",
            "HOROVOD_CACHE_CAPACITY": "100",
            "HOROVOD_LOG_LEVEL": "debug",
            "HVDLAB_RECORD": "0",
            "HVDLAB_PLANE": "gloo",
        }
    )
    assert (settings.timeline, settings.mark_cycles) == ("/tmp/t.json", True)
    assert (settings.start_timeout, settings.cache_capacity) == (7.0, 100)
    assert (settings.log_level, settings.record, settings.plane) == (10, False, "gloo")


def test_our_own_start_timeout_wins_over_horovods() -> None:
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "7", "HVDLAB_START_TIMEOUT": "8"}
    assert Settings.from_env(environ).start_timeout == 8.0


def test_a_timeline_that_is_started_later_is_none_yet() -> None:
    assert Settings.from_env({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None


def test_a_rank_also_refuses_what_only_the_coordinator_would_read() -> None:
    with pytest.raises(InvalidRequestError, match="HOROVOD_FUSION_THRESHOLD"):
        Settings.from_env({"HOROVOD_FUSION_THRESHOLD": "lots"})
