"""What is printed and told when a rank's program ends by an exception."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

from hvdlab.collectives import api, context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.uncaught import cut_own_frames


def test_a_traceback_ends_at_the_users_line() -> None:
    context.init()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            api.broadcast(np.ones(2), root_rank=5)
    finally:
        context.shutdown()
    error = caught.value
    assert len(traceback.extract_tb(error.__traceback__)) > 1
    cut_own_frames(error.__traceback__)
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["test_a_traceback_ends_at_the_users_line"]


def test_a_traceback_of_our_own_frames_stays() -> None:
    with pytest.raises(Exception, match=r"hvd\.init") as caught:
        context.engine("this")
    own = caught.value.__traceback__.tb_next  # without this test's frame
    before = traceback.extract_tb(own)
    cut_own_frames(own)
    assert traceback.extract_tb(own) == before
