"""A place for the ranks of each launcher, and checks that nothing is left there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.launchers.programs import ProgramRanks
from conformance.launchers.sites import PLACES, PRESENT, Site, temporary_directory
from hvdlab.kernel_ext.notebook.pool import Pool
from support.leaks import nothing_of_ours_left
from support.patience import PATIENCE
from support.ranks.started import StartedRanks


@pytest.fixture(scope="session", params=PRESENT)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a launcher, with its engine running if it needs one."""
    directory = tmp_path_factory.mktemp(request.param)
    with PLACES[request.param](directory) as site, pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(directory / "ipython"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HVDLAB_PRELOAD", "")
        yield site


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest, site: Site) -> Iterator[None]:
    """Beside an engine no process and no memory of ours may stay; without one the check of all tests applies."""
    if not site.engine:
        request.getfixturevalue("leak_check")
        yield
        return
    with nothing_of_ours_left():
        yield


@pytest.fixture(autouse=True)
def no_files_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leak_check: None) -> Iterator[None]:
    """Neither the temporary directory nor the working directory has a file more than before."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with temporary_directory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield
        assert os.listdir(directory) == []
    assert os.listdir(here) == []


@pytest.fixture
def ranks(site: Site) -> Iterator[StartedRanks]:
    """Yield two ranks without a pool; their processes are gone afterwards."""
    found = StartedRanks(site.name, site.hosts, site.options, far=site.far)
    try:
        found.start([0, 1], 2)
        yield found
    finally:
        found.close()


@pytest.fixture
def pool(site: Site) -> Iterator[Pool]:
    """Yield a pool of two ranks."""
    pool = Pool.start(
        2,
        launcher=site.name,
        hosts=site.hosts or None,
        launcher_options=dict(site.options),
        timeout=2 * PATIENCE,
    )
    yield pool
    pool.stop()


@pytest.fixture
def programs(site: Site) -> Iterator[ProgramRanks]:
    """Yield ranks that run a program, which the test starts; the remaining ones are ended afterwards."""
    found = ProgramRanks(site)
    yield found
    found.close()
