"""The binding of MXNet over a module that has its names only."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from hvdlab.collectives.errors import KVStoreError
from support.fakes.mxnet import fake_mxnet


@pytest.fixture
def mxnet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``hvdlab.mxnet`` be imported for one test."""
    monkeypatch.setitem(sys.modules, "mxnet", fake_mxnet())
    # The import sets the framework whose errors those of stores are from then on.
    monkeypatch.setattr(KVStoreError, "_framework", KVStoreError._framework)
    yield
    # With the modules that were imported over the fake: another test would otherwise find them in place of MXNet's binding.
    for name in [name for name in sys.modules if name == "hvdlab.mxnet" or name.startswith("hvdlab.mxnet.")]:
        del sys.modules[name]
