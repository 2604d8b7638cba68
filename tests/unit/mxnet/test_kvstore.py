"""Stores that run MXNet's optimizers, over a module that has MXNet's names only."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fakes.mxnet import Optimizer

pytestmark = pytest.mark.usefixtures("mxnet")


def test_refused_optimizer_leaves_the_former_ones_states(tmp_path: Path) -> None:
    from hvdlab.mxnet.kvstore import _create

    store, file = _create("local"), tmp_path / "states"
    store.set_optimizer(Optimizer("first"))
    with pytest.raises(ValueError, match="no-such-optimizer"):
        store.set_optimizer("no-such-optimizer")
    store.save_optimizer_states(str(file))
    assert file.read_bytes() == b"first"
