"""Worlds of 2 resident ranks, and for some tests of 1 and 4, for hvdlab.tensorflow. Only their processes import TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from support.ranks.resident import Ranks

if find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = str(tmp_path_factory.mktemp("tensorflow"))
    with Ranks(2, imports=["hvdlab.tensorflow"], env={"HVDLAB_TEST_FOLDER": folder}) as ranks:
        yield ranks


@pytest.fixture(scope="package", params=[1, 4])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Yield a world of 1 or 4 ranks."""
    folder = str(tmp_path_factory.mktemp("tensorflow"))
    with Ranks(request.param, imports=["hvdlab.tensorflow"], env={"HVDLAB_TEST_FOLDER": folder}) as ranks:
        yield ranks
