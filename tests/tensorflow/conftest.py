"""Two resident ranks for all tests of hvdlab.tensorflow; TensorFlow is imported in their processes only."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from ranks import Ranks

if find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package")
def two() -> Iterator[Ranks]:
    with Ranks(2, imports=["hvdlab.tensorflow"]) as ranks:
        yield ranks
