"""Libraries that train on top of ``torch.distributed``, in the environment that ``make engines`` makes; elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import PATIENCE

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]

SIZE = 2
_SETTINGS = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    "HVDLAB_PRELOAD": "engines.trainers.trainings,torch._dynamo,transformers,accelerate",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="package")
def shared() -> Iterator[Pool]:
    """Yield two ranks. The libraries take many seconds to import, so they are the same for all tests."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="hvd-t-", dir="/tmp") as own,
    ):
        for name, value in _SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("TMPDIR", own)
        patch.setattr(tempfile, "tempdir", own)
        patch.setenv("IPYTHONDIR", os.path.join(own, "ipython"))
        pool = Pool.start(SIZE, timeout=5 * PATIENCE)  # for imports on a busy machine
        try:
            assert pool.run("from engines.trainers import trainings", timeout=PATIENCE).errors == {}
            yield pool
        finally:
            pool.stop()


@pytest.fixture(params=["agreed", "watched:gloo"])
def watch(request: pytest.FixtureRequest) -> str:
    """Return how the test's process groups are supervised, as ``HVDLAB_C10D_WATCH`` says it."""
    return str(request.param)


@pytest.fixture
def pool(shared: Pool, watch: str, tmp_path: Path) -> Pool:
    """Return the two ranks, in a directory of the test's own, without a process group."""
    cell = f"import os; os.chdir({str(tmp_path)!r}); os.environ['HVDLAB_C10D_WATCH'] = {watch!r}; trainings.begin_anew()"
    assert shared.run(cell, timeout=PATIENCE).errors == {}
    return shared
