"""Two resident ranks for all tests of hvdlab.tensorflow, and for some one rank and four; TensorFlow is imported in their processes only."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from ranks import Ranks

if find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = str(tmp_path_factory.mktemp("tensorflow"))
    with Ranks(2, imports=["hvdlab.tensorflow"], env={"HVDLAB_TEST_FOLDER": folder}) as ranks:
        yield ranks


@pytest.fixture(scope="package", params=[1, 4])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Worlds of other sizes."""
    folder = str(tmp_path_factory.mktemp("tensorflow"))
    with Ranks(request.param, imports=["hvdlab.tensorflow"], env={"HVDLAB_TEST_FOLDER": folder}) as ranks:
        yield ranks
