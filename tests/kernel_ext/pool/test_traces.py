"""What a pool's ranks did, as whoever started the pool reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.pool import Pool

SETUP = """\
import numpy as np
from hvdlab.collectives import api, context
context.init()
def late(seconds):
    import time
    api.barrier()
    if context.engine().rank == 2:
        time.sleep(seconds)
    return api.allreduce(np.ones(3), "loss")
"""


@pytest.fixture
def pool(surroundings: Path) -> Iterator[Pool]:
    with Pool.start(3) as pool:
        assert not pool.run(SETUP).errors
        yield pool


def wait_for_rows(pool: Pool, name: str, count: int) -> None:
    """Until the notebook has this many rows of a tensor: ranks send what they have recorded every 0.1 s."""
    recording, deadline = pool.client.recording, Deadline(10)
    while True:
        version = recording.version
        if sum(pool.trace()["name"] == name) >= count:
            return
        assert recording.wait(version, timeout=deadline.remaining()), f"no {count} rows of {name}"


def test_spans_tell_which_line_of_which_cell_they_are_of(pool: Pool) -> None:
    # Above the source are a line with the cell's magic, and here an empty one.
    assert not pool.run("x = 1\napi.allreduce(np.ones(3), 'here')", label="[7]", line_offset=2).errors
    assert not pool.run("api.allreduce(np.ones(3), 'here')\nlate(0)", label="[8]").errors
    wait_for_rows(pool, "here", 6)
    wait_for_rows(pool, "loss", 3)
    table = pool.trace()
    here = table[table["name"] == "here"]
    assert here.groupby("site", observed=True)["rank"].apply(sorted).to_dict() == {
        "cell [7] line 4": [0, 1, 2],
        "cell [8] line 2": [0, 1, 2],
    }
    (inner,) = set(table[table["name"] == "loss"]["site"])
    assert inner.endswith(" line 9"), "the line that calls it, not the one that calls that"
