"""``%%hvd_run --elastic`` in a real kernel: the pool grows, loses a rank and shrinks while a cell trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.jupyter.live_kernel import Cell, LiveKernel
from support.patience import PATIENCE

SET_UP = """\
%%hvd_run -np 2
import os, torch, hvdlab.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0, stop=0)

@hvd.elastic.run
def train(state):
    said = 0
    while not state.stop:
        state.step += 1
        state.stop = int(hvd.allreduce(torch.tensor(float(os.path.exists('{end}'))), name='stop', op=hvd.Sum) > 0)
        if said != hvd.size():
            said = hvd.size()
            print('trains with', said, flush=True)
        state.commit()
"""
CELL = "%%hvd_run --elastic --min-np 2 --max-np 3 --background\ntrain(state)\nprint('ended')"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[LiveKernel]:
    prepare = ["%load_ext hvdlab", SET_UP.format(end=tmp_path / "end")]
    kernel = LiveKernel(tmp_path, environment={"HVDLAB_PRELOAD": "torch"}, prepare=prepare)
    yield kernel
    kernel.close()


@pytest.mark.timeout(240)
def test_ranks_come_and_go_under_a_cell_of_the_notebook(kernel: LiveKernel, tmp_path: Path) -> None:
    training = kernel.run(CELL)
    assert training.error is None

    def told(text: str) -> None:
        kernel.until(lambda: text in training.text("stdout") + training.text("stderr"), PATIENCE)

    def done(code: str) -> Cell:
        cell = kernel.run(code)
        assert cell.error is None, cell.error
        return cell

    told("[0,1] trains with 2")
    # The newcomer lacks nothing, so no missing variables are reported.
    assert done("%hvd_pool resize 3").lines() == ["ranks 0-2 are ready"]
    told("[0-2] trains with 3")
    refused = kernel.run("%hvd_pool resize 4")
    assert refused.error is not None or "more than --max-np 3" in refused.text("stderr")
    done(
        "import os, signal; os.kill(get_ipython().find_magic('hvd_pool')('status').rows[2].pid, signal.SIGKILL)"
    )
    told("rank 2 died: killed by SIGKILL")
    assert done("%hvd_pool repair").text().startswith("rank 2 is back")
    told("rank 2 joins at the others' next commit")
    text = done("print(repr(get_ipython().find_magic('hvd_elastic')('')))").text()
    assert "3 of 3 ranks are there; cell [3] trains on ranks 0-2, at least 2, at most 3" in text
    changes = [line.split()[1:4] for line in text.split("change", 1)[1].splitlines()[1:]]
    generations = [one for one in changes if one[1] == "regrouped"]
    assert len(generations) >= 3
    assert set(map(tuple, generations)) == {("all", "regrouped", "ranks")}
    # A rank waits for no time if the others commit just then; the last one may not have been let in yet.
    changes = [one for one in changes if one not in generations and one[1] != "waits"]
    assert changes[:6] == [
        ["0", "joined", "start"],
        ["1", "joined", "start"],
        ["2", "joined", "resize"],
        ["2", "admitted", "after"],
        ["2", "died", "killed"],
        ["2", "joined", "repair"],
    ]
    done("%hvd_pool resize 2")
    told("rank 2 has left; nothing is lost by that")
    (tmp_path / "end").touch()
    told("[0,1] ended")
    assert "rank 2 joins at the others' next commit" in training.lines()
    (died,) = training.lines("stderr")
    assert died.startswith("rank 2 died: killed by SIGKILL")


@pytest.mark.timeout(240)
def test_the_strip_knows_the_ranks_that_join_and_die(tmp_path: Path) -> None:
    pytest.importorskip("anywidget")
    prepare = ["%load_ext hvdlab", SET_UP.format(end=tmp_path / "end")]
    environment = {"HVDLAB_PRELOAD": "torch", "HVDLAB_METRICS_INTERVAL": "0.2"}
    kernel = LiveKernel(tmp_path, strip=True, environment=environment, prepare=prepare)
    try:
        training = kernel.run(CELL)

        def shown() -> list[int]:
            came = [*kernel.others, *(one for cell in kernel.cells.values() for one in cell.messages)]
            states = [
                (at, content["data"]["state"]["pace"])
                for at, kind, content in came
                if kind == "comm_msg" and "pace" in content["data"].get("state", {})
            ]
            nothing: tuple[float, dict[str, Any]] = (0, {"ranks": []})
            last = max(states, key=lambda one: one[0], default=nothing)
            return [one["rank"] for one in last[1]["ranks"]]

        kernel.until(lambda: shown() == [0, 1], PATIENCE)
        kernel.run("%hvd_pool resize 3")
        kernel.until(lambda: shown() == [0, 1, 2], PATIENCE)
        kernel.run("%hvd_pool resize 2")
        kernel.until(lambda: shown() == [0, 1], PATIENCE)
        (tmp_path / "end").touch()
        summary = "3 ranks, rank 2 is gone · "
        kernel.until(
            lambda: any(one["data"]["text/plain"].startswith(summary) for one in training.of("display_data")),
            PATIENCE,
        )
    finally:
        kernel.close()
