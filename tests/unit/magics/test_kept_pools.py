"""``%hvd_pool start --keep``, ``attach``, ``detach`` and ``list`` in a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.cells.sink import Sinks
from hvdlab.kernel_ext.notebook.kept_pools import OrphanedCell, Show
from hvdlab.kernel_ext.wire.cells import RetainedCell, RunCell
from support.fakes.notebook import FakePool, Notebook


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def left() -> list[OrphanedCell]:
    return []


@pytest.fixture
def sinks() -> list[Sinks]:
    return []


@pytest.fixture(autouse=True)
def kept(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, left: list[OrphanedCell], sinks: list[Sinks]
) -> None:
    """There is a pool called ``mine``, with the cells that are ``left``, whose output goes to ``sinks``."""

    def attach(name: str, show: Show, launcher: str | None) -> FakePool:
        if launcher == "mpi":
            raise InvalidRequestError("asked for by the launcher's name")
        if name != "mine":
            raise InvalidRequestError(f"there is no pool `{name}`; there is `mine`")
        sinks.extend(show(cell) for cell in left)
        return FakePool(3, keep=name)

    monkeypatch.setattr(notebook.extension.session, "_attach_pool", attach)


def test_a_kept_pool_says_how_it_is_found(notebook: Notebook) -> None:
    ran = notebook.run("%hvd_pool start 2 --keep mine")
    assert ran.stdout == "ranks 0,1 are ready; `%hvd_pool attach mine` in another notebook finds them\n"
    pool = notebook.pool
    assert notebook.run("%hvd_pool detach").stdout == "the ranks stay; `%hvd_pool attach mine` finds them\n"
    assert pool.detached
    assert "no ranks are running" in notebook.run("%hvd_pool status").usage_error


def test_a_pool_is_attached_to_by_its_name(notebook: Notebook) -> None:
    assert notebook.run("%hvd_pool attach your").usage_error == "there is no pool `your`; there is `mine`"
    named = notebook.run("%hvd_pool attach mine --launcher mpi").usage_error
    assert named == "asked for by the launcher's name"
    assert notebook.run("%hvd_pool attach mine").stdout == "ranks 0-2 are ready, with all variables\n"
    assert "has ranks already" in notebook.run("%hvd_pool attach mine").usage_error
    assert notebook.run("%%hvd_run\nrank").result is not None


def test_cells_that_the_notebook_before_has_left_go_on_under_the_attach(
    notebook: Notebook, left: list[OrphanedCell], sinks: list[Sinks]
) -> None:
    running, ended = RetainedCell("c", "[7]", 0, 0, True), RetainedCell("c", "[7]", 0, 0, False)
    trains = RetainedCell("e", "[9]", 0, 0, True, RunCell("e", "[9]", "train(state)", at_least=1))
    left += [OrphanedCell("c", "[7]", {0: ended, 1: running}), OrphanedCell("d", "[8]", {2: ended})]
    left += [OrphanedCell("e", "[9]", {0: trains, 1: trains})]
    lines = notebook.run("%hvd_pool attach mine").stdout.splitlines()
    assert lines == [
        "cell [7] of the notebook before still runs on rank 1; what it wrote meanwhile follows",
        "cell [8] of the notebook before has ended; what it wrote meanwhile follows",
        "cell [9] of the notebook before still trains on ranks 0,1; what it wrote meanwhile follows",
        "ranks 0-2 are ready, with all variables",
    ]
    assert len(sinks) == 3


def test_a_cell_that_its_notebooks_end_interrupted_is_named(
    notebook: Notebook, left: list[OrphanedCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = RetainedCell("c", "[7]", 0, 0, False, interrupted=True)
    left += [OrphanedCell("c", "[7]", {0: stopped})]
    monkeypatch.setattr(FakePool, "news", lambda pool: ["cell [6] was interrupted when its notebook ended"])
    assert notebook.run("%hvd_pool attach mine").stdout.splitlines() == [
        "cell [7] was interrupted when its notebook ended",
        "cell [7] of the notebook before has ended; what it wrote meanwhile follows",
        "cell [6] was interrupted when its notebook ended",
        "ranks 0-2 are ready, with all variables",
    ]


def test_unloading_leaves_a_kept_pool_alone(notebook: Notebook) -> None:
    notebook.run("%hvd_pool attach mine")
    pool = notebook.pool
    notebook.extension.session.close()
    assert pool.detached


def test_unloading_says_that_a_kept_pool_goes_on(notebook: Notebook) -> None:
    assert notebook.shell.extension_manager is not None
    notebook.shell.extension_manager.loaded.add("hvdlab")
    notebook.run("%hvd_pool attach mine")
    said = notebook.run("%unload_ext hvdlab").stdout
    assert said == "let go of 3 ranks, which go on; `%hvd_pool attach mine` comes back to them\n"
    notebook.extension.load()


def test_wrong_calls_say_what_is_right(notebook: Notebook) -> None:
    assert "no pool is kept" in notebook.run("%hvd_pool attach").usage_error
    assert "no pool is kept" in notebook.run("%hvd_pool list").stdout
    assert "--keep belongs to `start`" in notebook.run("%hvd_pool stop --keep").usage_error
    notebook.run("%hvd_pool start 2")
    assert "were started without it" in notebook.run("%hvd_pool start --keep").usage_error
    assert "can be left to itself" in notebook.run("%hvd_pool detach").usage_error


def test_what_happened_meanwhile_is_said_before_the_next_cell(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 2")
    notebook.pool.told.append("the coordinator ended and was replaced")
    assert notebook.run("%%hvd_run\npass").lines == ["the coordinator ended and was replaced"]
    assert notebook.run("%%hvd_run\npass").lines == []
