"""The other magics, and loading and unloading."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hvdlab
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.wire.status import RankStatus, ServerNow, UserNames
from hvdlab.magics.pool_magics import StatusTable, StoryTable
from support.fakes.notebook import Notebook


def test_the_story_is_a_table(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start -np 2")
    told = notebook.run("%hvd_pool status --story --rank 1")
    assert told.error is None
    table = StoryTable(notebook.pool.story(rank=1))
    assert [row[0] for row in table.cells()] == ["17", "18"]
    assert table.cells()[1][2:] == ("died", "rank 1", "reason: killed by SIGKILL", "17")
    assert "no  time" in repr(table)
    page = StoryTable(notebook.pool.story())._repr_html_()
    assert "&lt;loss&gt;" in page
    assert "process set 0, generation 3" in page
    for wrong in ("%hvd_pool stop --story", "%hvd_pool status --rank 1", "%hvd_pool status --story --last 0"):
        assert notebook.run(wrong).usage_error


def test_status_is_a_table(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start -np 2")
    ran = notebook.run("%hvd_pool status")
    rows = repr(ran.result).splitlines()
    assert rows[0].split() == ["rank", "host", "pid", "device", "state", "cell", "memory", "CPU", "plane"]
    assert rows[1].split() == ["0", "here", "100", "cpu", "idle", "3", "MiB", "1.2", "s", "auto"]
    assert "<th" in ran.result._repr_html_()


def test_hosts_are_named_without_their_keys_unless_two_have_one_name() -> None:
    def shown(*hosts: str) -> list[str]:
        rows = [RankStatus(rank, host) for rank, host in enumerate(hosts)]
        return [row[1] for row in StatusTable(rows).cells()]

    assert shown("a#1", "a#1", "b#2", "") == ["a", "a", "b", ""]
    assert shown("a#1", "a#2", "b#3") == ["a#1", "a#2", "b"]


def test_memory_that_a_rank_holds_on_gpus_stands_beside_its_device() -> None:
    rows = [
        RankStatus(0, device="cuda:1", device_memory=3 << 30),
        RankStatus(1, device="cuda:1"),
        RankStatus(2),
    ]
    assert [row[3] for row in StatusTable(rows).cells()] == ["cuda:1, 3.0 GiB", "cuda:1", ""]


def test_the_link_of_cuda_tensors_stands_beside_the_planes() -> None:
    rows = [
        RankStatus(0, plane="shm, cuda/ipc", links={"NVLink": (1, 2)}),
        RankStatus(1, plane="shm, cuda/ipc", links={"same GPU": (2,), "NVLink": (0,)}),
        RankStatus(2, plane="shm", links={"CUDA tensors through the host": (0, 1)}),
        RankStatus(3, plane="shm, cuda/ipc"),
    ]
    assert [row[8] for row in StatusTable(rows).cells()] == [
        "shm, cuda/ipc (NVLink)",
        "shm, cuda/ipc (same GPU: 2; NVLink: 0)",
        "shm (CUDA tensors through the host)",
        "shm, cuda/ipc",
    ]
    assert "links" not in repr(rows[3])
    assert "links={'NVLink': (1, 2)}" in repr(rows[0])


def test_servers_have_a_table_of_their_own_below_the_ranks() -> None:
    """Each once, by the report of the rank that knows most of it; only ranks of its host know its memory."""
    alone = StatusTable([RankStatus(0, "a#1")])
    assert "server" not in repr(alone) + alone._repr_html_()
    here, there = (
        ServerNow(0, "a#1", 70, 2, 3 << 20, 9 << 20),
        ServerNow(1, "<b>#2", 71, 1, 2048, 0),
    )
    rows = [
        RankStatus(0, "a#1", servers=(here, there)),
        RankStatus(
            1,
            "<b>#2",
            servers=(ServerNow(0, "a#1", 70, 1, 8, 0), ServerNow(1, "<b>#2", 71, 1, 2048, 5 << 20)),
        ),
        RankStatus(2, "<b>#2", state="starting"),
    ]
    table = StatusTable(rows)
    assert table.server_cells() == [
        ("0", "a", "70", "2", "3 MiB", "9 MiB"),
        ("1", "<b>", "71", "1", "2 KiB", "5 MiB"),
    ]
    assert repr(table).splitlines()[-3].split() == ["server", "host", "pid", "keys", "values", "memory"]
    page = table._repr_html_()
    assert page.count("<tr>") == 7
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_a_repaired_rank_is_empty_and_that_is_said(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run("%hvd_pool start 2")
    monkeypatch.setattr(notebook.pool, "repair", lambda: (1,))
    monkeypatch.setattr(notebook.pool, "newcomers", (1,))
    monkeypatch.setattr(
        notebook.pool, "names", lambda: {0: UserNames(0, ("x",), ()), 1: UserNames(0, (), ())}
    )
    (said,) = notebook.run("%hvd_pool repair").lines
    assert said.startswith("rank 1 is back (0.0 s); it lacks x: ")
    assert "`%%hvd_rank 1`" in said


def test_newcomers_are_told_of_and_synced(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%hvd_pool start 2")
    known = {0: UserNames(0, ("x",), ()), 1: UserNames(0, ("x",), ())}
    monkeypatch.setattr(
        notebook.pool, "names", lambda: {**known, 2: UserNames(0, (), ()), 3: UserNames(0, (), ())}
    )
    new = "ranks 2,3 are new; they lack x: `%hvd_pool sync 2,3` brings them all that, as `%%hvd_run --sync` does "
    ready, said = notebook.run("%hvd_pool resize 4").lines
    assert ready == "ranks 0-3 are ready"
    assert said.startswith(new)
    assert notebook.run("%hvd_pool sync --without lock --without file").lines == ["synced [2, 3]"]
    assert notebook.run("%hvd_pool sync 1,3 --from 2").lines == ["synced [1, 3]"]
    assert notebook.pool.synced == [(None, None, ("lock", "file")), ([1, 3], 2, ())]
    assert "rank 0 has nothing left" in str(notebook.run("%hvd_pool sync --without everything").error)
    for line, why in {
        "repair --from 1": "--from belongs to `sync`",
        "sync 7": "rank 7 is out of range",
    }.items():
        assert why in str(notebook.run(f"%hvd_pool {line}").error)

    notebook.run("%hvd_pool resize 2")
    assert notebook.run("%%hvd_run -np 4\n1").stdout.startswith(new)


def test_the_pool_by_hand(notebook: Notebook) -> None:
    assert notebook.run("%hvd_pool start 2").lines == ["ranks 0,1 are ready"]
    assert notebook.run("%hvd_pool resize 4").lines == ["ranks 0-3 are ready"]
    assert notebook.run("%hvd_pool restart 1,2").lines == ["ranks 1,2 started again, with empty memory"]
    assert notebook.pool.restarted == [1, 2]
    assert notebook.run("%hvd_pool repair").lines == ["no rank is missing"]
    assert notebook.run("%hvd_pool stop").lines == ["all ranks have ended"]
    assert notebook.run("%hvd_pool stop").lines == ["no ranks are running"]


def test_variables_are_pulled_and_pushed(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = rank * 2")
    notebook.run("%hvd_pull x")
    assert notebook.shell.user_ns["x"] == {0: 0, 1: 2}
    notebook.run("%hvd_pull x --ranks 1")
    assert notebook.shell.user_ns["x"] == 2
    assert notebook.run("%hvd_pull x").result is None  # it is bound, and may be too large to be printed
    notebook.run("got = %hvd_pull x --ranks 1")
    assert (notebook.shell.user_ns["got"], notebook.shell.user_ns["x"]) == (2, 2)
    notebook.run("%%hvd_run\nz = rank")
    notebook.run("both = %hvd_pull x z")
    assert notebook.shell.user_ns["both"] == ({0: 0, 1: 2}, {0: 0, 1: 1})
    notebook.run("y = 'hello'\n%hvd_push y")
    assert notebook.run("%%hvd_run\nprint(y)").lines == ["[0,1] hello"]


def test_plain_cells_run_on_the_ranks_while_autohvd_is_on(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 2")
    notebook.run("%autohvd")
    assert notebook.run("print(rank)").lines == ["[0] 0", "[1] 1"]
    assert notebook.run("%hvd_pool repair").lines == ["no rank is missing"]
    notebook.run("%%local\nhere = 5")
    assert notebook.shell.user_ns["here"] == 5
    assert notebook.run("%autohvd off").lines == ["cells run in the notebook"]
    assert notebook.run("print(here)").lines == ["5"]


def test_line_numbers_count_from_the_first_line_with_autohvd(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 2")
    notebook.run("%autohvd")
    assert "line 2, in <module>" in notebook.run("x = 1\n1 / 0").stdout


def test_a_local_cell_that_fails_has_its_own_line_numbers(notebook: Notebook) -> None:
    ran = notebook.run("%%local\nx = 1\n1 / 0")
    assert isinstance(ran.error, ZeroDivisionError)
    assert ran.stdout.count("ZeroDivisionError") == 2
    assert "line 3" in ran.stdout


def test_loading_twice_is_harmless_and_unloading_removes_all(notebook: Notebook) -> None:
    shell = notebook.shell
    hvdlab.load_ipython_extension(shell)
    assert shell.input_transformers_cleanup.count(notebook.extension._auto) == 1
    hvdlab.unload_ipython_extension(shell)
    assert shell.find_cell_magic("hvd_run") is None
    assert notebook.extension._auto not in shell.input_transformers_cleanup
    hvdlab.unload_ipython_extension(shell)
    notebook.extension.load()


def test_unloading_stops_the_pool(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 2")
    pool = notebook.pool
    notebook.extension.session.close()
    assert pool.state == "stopped"


def test_reloading_keeps_the_ranks_and_unloading_says_what_it_ends(notebook: Notebook) -> None:
    assert notebook.shell.extension_manager is not None
    notebook.shell.extension_manager.loaded.add("hvdlab")
    notebook.run("%hvd_pool start 3")
    pool, session = notebook.pool, notebook.extension.session
    ran = notebook.run("%reload_ext hvdlab")
    assert (ran.stdout, ran.error) == ("", None)
    assert notebook.extension.session is session
    assert session.pool is pool
    assert pool.state != "stopped"
    assert notebook.run("%hvd_pool status").error is None
    assert notebook.run("%unload_ext hvdlab").stdout == "ended 3 ranks, and all variables there\n"
    assert pool.state == "stopped"
    assert notebook.shell.find_cell_magic("hvd_run") is None
    notebook.extension.load()


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, hvdlab; print([m for m in ('numpy', 'torch', 'IPython', 'msgspec') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pol'"):
        hvdlab.Pol  # noqa: B018


def test_ranks_that_end_because_the_pool_shrinks_are_named(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 4")
    assert notebook.run("%hvd_pool resize 3").lines == [
        "rank 3 has ended, with its variables",
        "ranks 0-2 are ready",
    ]
    assert notebook.run("%%hvd_run -np 1\npass").lines == ["ranks 1,2 have ended, with their variables"]
    assert notebook.run("%hvd_pool resize 2").lines[0] == "ranks 0,1 are ready"


def test_only_living_ranks_are_ready(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%hvd_pool start 3")
    monkeypatch.setattr(type(notebook.pool), "ranks", (0,))
    notebook.pool.lost = {1: "killed by SIGKILL", 2: "killed by SIGKILL"}
    said = notebook.run("%hvd_pool resize 3").lines[0]
    assert said == "rank 0 is ready; ranks 1,2 are lost, `%hvd_pool repair` replaces them"


def test_a_cell_brings_newcomers_what_the_others_know_before_it_runs(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 2")
    notebook.pool.names = lambda ranks=None: {0: UserNames(0, ("model",), ()), 2: UserNames(0, (), ())}  # type: ignore[method-assign]
    ran = notebook.run("%%hvd_run -np 3 --sync\npass")
    assert ran.lines == ["synced [2]"]
    assert notebook.run("%%hvd_run --sync\npass").lines == []


def test_variables_of_ranks_that_answer_late_are_brought_all_the_same(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 2")
    notebook.pool.names = lambda ranks=None: {2: UserNames(0, (), ())}  # type: ignore[method-assign]
    assert notebook.run("%%hvd_run -np 3 --sync\npass").lines == ["synced [2]"]
    notebook.pool.names = lambda ranks=None: {rank: UserNames(0, (), ()) for rank in range(4)}  # type: ignore[method-assign]
    assert notebook.run("%%hvd_run -np 4 --sync\npass").lines == []


def test_a_name_that_only_ranks_have_is_pointed_out_after_the_error(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start 3")
    notebook.pool.names = lambda ranks=None: {r: UserNames(0, ("model",), ("hvd",)) for r in range(3)}  # type: ignore[method-assign]
    assert notebook.run("model").lines[-1] == "`model` exists on ranks 0-2: put `%%hvd_run` on top"
    assert notebook.run("hvd.rank()").lines[-1] == "`hvd` exists on ranks 0-2: put `%%hvd_run` on top"
    assert "exists on" not in notebook.run("other").stdout
    assert "exists on" not in notebook.run("%%hvd_run\nmodel").stdout
    notebook.run("%hvd_pool stop")
    assert "exists on" not in notebook.run("model").stdout


def test_a_comment_above_the_magic_is_pointed_out(notebook: Notebook) -> None:
    said = notebook.run("# trains\n%%hvd_run\nrank").stdout
    assert "`%%hvd_run` must be the first line of its cell" in said


def test_the_notebooks_pool_has_a_name_in_python(notebook: Notebook) -> None:
    with pytest.raises(InvalidRequestError, match="no ranks are running"):
        hvdlab.pool()
    notebook.run("%hvd_pool start 2")
    assert hvdlab.pool() is notebook.pool


def test_a_rank_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlab.collectives.context.in_rank_of_pool", lambda: True)
    with pytest.raises(InvalidRequestError, match="this is a rank"):
        hvdlab.pool()
