"""``horovod.runner.common.util.env``, and modules that are not there."""

from __future__ import annotations

import importlib

import pytest

from hvdlab.horovod.runner.common.util.env import get_env_rank_and_size

NAMES = (
    *("HOROVOD_RANK", "HOROVOD_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_a_launcher_is_alone() -> None:
    assert get_env_rank_and_size() == (0, 1)


@pytest.mark.parametrize("prefix", ["HOROVOD", "OMPI_COMM_WORLD", "PMI"])
def test_rank_and_size_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv(f"{prefix}_RANK", "3")
    monkeypatch.setenv(f"{prefix}_SIZE", "8")
    assert get_env_rank_and_size() == (3, 8)


def test_half_of_a_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "8")
    with pytest.raises(RuntimeError, match="PMI_SIZE is set, but PMI_RANK is not"):
        get_env_rank_and_size()


def test_the_module_is_imported_under_horovods_name() -> None:
    import hvdlab

    hvdlab.install_as_horovod()
    module = importlib.import_module("horovod.runner.common.util.env")
    assert module.get_env_rank_and_size() == (0, 1)
    with pytest.raises(ModuleNotFoundError, match="inside of Horovod's launcher"):
        importlib.import_module("horovod.runner.common.service")
    with pytest.raises(ModuleNotFoundError, match=r"dataset\.shard"):
        importlib.import_module("horovod.tensorflow.data.compute_service")
