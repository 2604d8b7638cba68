"""In a pool, ``import horovod`` means hvdlab by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdlab.kernel_ext.notebook.pool import Pool


@pytest.fixture
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    monkeypatch.delenv("HVDLAB_AS_HOROVOD", raising=False)
    if request.param is not None:
        monkeypatch.setenv("HVDLAB_AS_HOROVOD", request.param)
    started = Pool.start(2)
    yield started
    started.stop()


LOOK = """
try:
    import horovod
    from horovod.common.basics import HorovodBasics
    world = HorovodBasics(__file__)
    world.init()
    answer = horovod.__name__, world.rank()
except ImportError as error:
    answer = str(error)
answer
"""


@pytest.mark.parametrize("pool", [None, "1"], indirect=True)
def test_cells_import_horovod(pool: Pool) -> None:
    results = pool.run(LOOK.replace("__file__", "'here'"))
    assert results.errors == {}
    assert list(results) == [("hvdlab.horovod", 0), ("hvdlab.horovod", 1)]


@pytest.mark.parametrize("pool", ["0"], indirect=True)
def test_the_switch_turns_it_off(pool: Pool) -> None:
    # The directory of these tests may be found by that name, as a package without anything in it.
    assert all("No module named 'horovod" in answer for answer in pool.run(LOOK))
