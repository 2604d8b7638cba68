"""The magics in a real kernel with real ranks, as a frontend sees them."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.output.merge import REFRESH
from support.jupyter.live_kernel import Cell, LiveKernel
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share
from support.patience import PATIENCE

SETUP = "%%hvd_run -np 4\nimport os, sys, time\nrank = int(os.environ['RANK'])\nx = rank * 10"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    kernel = LiveKernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(started: LiveKernel) -> LiveKernel:
    """Return a kernel with four ranks that know ``rank`` and ``x``."""
    started.run("%load_ext hvdlab")
    started.answer_within()
    cell = started.run(SETUP)
    assert cell.error is None, cell.error
    return started


LISTEN = """
import sys, threading
imported, loading, user = set(), False, threading.get_ident()
def hear(event, arguments):
    if event == 'import' and loading and threading.get_ident() == user:
        imported.add(arguments[0])
sys.addaudithook(hear)
"""


def test_loading_is_silent_and_leaves_what_is_heavy_to_another_thread(started: LiveKernel) -> None:
    started.run(LISTEN)
    cell = started.run("loading = True\nget_ipython().run_line_magic('load_ext', 'hvdlab')\nloading = False")
    assert cell.error is None
    assert cell.text() == ""
    found = set(json.loads(started.run("import json; print(json.dumps(sorted(imported)))").text()))
    assert "hvdlab.magics.extension" in found
    assert "hvdlab.kernel_ext.notebook.pool" not in found
    foreign = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert foreign <= {"hvdlab", "IPython", "msgspec", "numpy", "typing_extensions"}


def test_output_comes_while_the_cell_runs(kernel: LiveKernel) -> None:
    cell = kernel.send(f"%%hvd_run\nprint('begin')\n{wait_for('go on')}\nprint('end')")
    kernel.until(lambda: bool(cell.lines()))
    assert cell.lines() == ["[0-3] begin"]
    (kernel.directory / "go on").touch()
    kernel.finish(cell)
    assert cell.lines() == ["[0-3] begin", "[0-3] end"]


def test_what_differs_is_labelled_and_stderr_stays_stderr(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run\nprint('loss', x)\nprint('careful', file=sys.stderr)")
    assert cell.lines() == ["[0] loss 0", "[1] loss 10", "[2] loss 20", "[3] loss 30"]
    assert cell.lines("stderr") == ["[0-3] careful"]


def test_what_c_code_prints_is_captured(kernel: LiveKernel) -> None:
    assert kernel.run("%%hvd_run --ranks 0,1\nos.system('echo from a process')").lines()[:1] == [
        "[0,1] from a process"
    ]


@pytest.mark.parametrize("alike", [True, False])
def test_80000_lines_are_complete_and_in_order(kernel: LiveKernel, alike: bool) -> None:
    text = "'line', i" if alike else "'rank', rank, 'line', i"
    cell = kernel.run(f"%%hvd_run\nfor i in range(20000): print({text})")
    seen: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for line in cell.lines():
        match = re.fullmatch(r"\[([\d,-]+)\] (?:rank (\d) )?line (\d+)", line)
        assert match, line
        ranks = _ranks(match[1])
        assert match[2] is None or ranks == [int(match[2])]
        for rank in ranks:
            seen[rank].append(int(match[3]))
    assert all(numbers == list(range(20000)) for numbers in seen.values())
    streams = cell.of("stream")
    assert len(streams) < 1000 * max(1.0, cell.seconds), "Jupyter's server drops messages above 1000 a second"


def wait_for(name: str) -> str:
    """Return a line with which ranks wait for a file in the kernel's directory."""
    return f"while not os.path.exists({name!r}): time.sleep(0.01)"


def wait_for_ranks(name: str, *ranks: int) -> str:
    """Return a line with which a rank waits for a file of each of these ranks in the kernel's directory.

    A rank that fails before the others are where the test means them would have them interrupted elsewhere.
    """
    return f"while not all(os.path.exists(f'{name}{{other}}') for other in {ranks}): time.sleep(0.01)"


def _ranks(spec: str) -> list[int]:
    bounds = [part.split("-") for part in spec.split(",")]
    return [rank for b in bounds for rank in range(int(b[0]), int(b[-1]) + 1)]


def test_figures_and_tables_stand_under_their_rank(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run\nimport pandas as pd\nif rank == 3: display(pd.DataFrame({'a': [1]}))")
    label, table = cell.of("display_data")
    assert "rank 3" in label["data"]["text/html"]
    assert "<table" in table["data"]["text/html"]


def test_figures_of_matplotlib_are_shown(kernel: LiveKernel) -> None:
    cell = kernel.run(
        "%%hvd_run\n%matplotlib inline\nimport matplotlib.pyplot as plt\nif rank == 1: plt.plot([1, 2])\n",
        timeout=90,
    )
    pictures = [d for d in cell.of("display_data") if "image/png" in d["data"]]
    assert len(pictures) == 1, cell.messages


def test_values_are_the_result(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run --out values\nx + 1")
    (result,) = cell.of("execute_result")
    assert result["data"]["text/plain"] == "[0] 1\n[1] 11\n[2] 21\n[3] 31"
    assert kernel.run("print(values[3], _[2], len(_))").lines() == ["31 21 4"]


def test_an_import_that_a_value_needs_is_shown_while_it_lasts(kernel: LiveKernel) -> None:
    (kernel.directory / "costly.py").write_text("class Value:\n    def __repr__(self): return 'a value'\n")
    for code in ("_[2]", "pending.wait()[2]"):
        option = "--background --out pending" if "wait" in code else ""
        kernel.run(f"%%hvd_run {option}\nimport sys; sys.path.insert(0, '')\nimport costly\ncostly.Value()")
        cell = kernel.run(code)
        assert cell.of("execute_result")[0]["data"]["text/plain"] == "a value"
        (shown,) = cell.of("display_data")
        assert shown["data"] == {"text/plain": "importing costly …"}
        (erased,) = cell.of("update_display_data")
        assert erased["transient"] == shown["transient"]
        assert not any(erased["data"].values())
        assert kernel.run(code).of("display_data") == []
        kernel.run("import sys; del sys.modules['costly']")


def test_a_progress_bar_is_live_and_ends_as_text(kernel: LiveKernel) -> None:
    cell = kernel.send(
        "%%hvd_run\nfrom tqdm import tqdm\nfor i in tqdm(range(10), mininterval=0):\n    time.sleep(0.1)\n"
        f"    if i == 5:\n        {wait_for('seen half')}"
    )
    kernel.until(lambda: any("50%" in state for state in live_states(cell)))
    (kernel.directory / "seen half").touch()
    kernel.finish(cell)
    (shown,) = cell.of("display_data")
    updates = cell.of("update_display_data")
    areas = {d["transient"]["display_id"] for d in (shown, *updates)}
    assert len(areas) == 1
    assert len(updates) <= 2 + cell.seconds / REFRESH
    assert updates[-1]["data"]["text/plain"] == ""
    assert all("100%" in line for line in cell.lines("stderr"))


def live_states(cell: Cell) -> list[str]:
    """Return what was shown below the cell meanwhile, one after the other."""
    shown = [*cell.of("display_data"), *cell.of("update_display_data")]
    return [str(content["data"]["text/plain"]) for content in shown]


def nested_bars(wait: str) -> str:
    """Return code with two bars, one in the other, which waits in the middle of the inner one's second time."""
    return (
        "from tqdm.auto import tqdm\nfor epoch in tqdm(range(2), desc='epoch', mininterval=0):\n"
        "    for batch in tqdm(range(10), desc='batch', leave=False, mininterval=0):\n"
        f"        time.sleep(0.05)\n        if (epoch, batch) == (1, 5):\n            {wait}"
    )


def test_nested_progress_bars_are_live_and_only_those_that_stay_end_as_text(kernel: LiveKernel) -> None:
    cell = kernel.send(f"%%hvd_run\n{nested_bars(wait_for('seen nested'))}")
    kernel.until(lambda: any("epoch:  50%" in state and "batch:  " in state for state in live_states(cell)))
    (kernel.directory / "seen nested").touch()
    kernel.finish(cell)
    ended = cell.lines("stderr")
    assert all("epoch: 100%" in line for line in ended), ended
    assert sorted(rank for line in ended for rank in _ranks(line[1 : line.index("]")])) == [0, 1, 2, 3]
    states = live_states(cell)
    assert all(len(state.splitlines()) <= 8 for state in states), states
    assert states[-1] == ""


def test_nested_progress_bars_of_one_rank_are_live_too(kernel: LiveKernel) -> None:
    cell = kernel.send(f"%%hvd_rank 2\n{nested_bars(wait_for('seen nested of one'))}")
    kernel.until(
        lambda: any(state.startswith("epoch:  50%") and "\nbatch:  " in state for state in live_states(cell))
    )
    (kernel.directory / "seen nested of one").touch()
    kernel.finish(cell)
    assert cell.text("stderr").count("\n") <= 2, cell.text("stderr")
    assert "epoch: 100%" in cell.lines("stderr")[-1]
    assert live_states(cell)[-1] == ""


def test_a_failure_ends_the_cell_everywhere_and_shows_the_cause(kernel: LiveKernel) -> None:
    cell = kernel.run(
        f"%%hvd_run\nprint('on')\nif rank == 2:\n    {wait_for_ranks('sleeps', 0, 1, 3)}\n    raise ValueError('bad')\n"
        "open(f'sleeps{rank}', 'w').close(); time.sleep(3600)"
    )
    assert cell.error is not None
    assert (cell.error["ename"], cell.error["evalue"]) == ("ValueError", "bad")
    lines = _plain("\n".join(cell.error["traceback"])).split("\n")
    assert lines[0] == "rank 2 failed:"
    assert "Cell In[" in lines[3]
    assert lines[3].endswith("line 5")
    assert re.fullmatch(r"ranks 0,1,3: interrupted at cell \[\d+\] line 6", lines[-1])
    assert cell.reply["status"] == "error"
    assert kernel.run("%%hvd_run\nprint(x)").lines() == ["[0] 0", "[1] 10", "[2] 20", "[3] 30"]


def test_ranks_in_a_collective_are_folded(kernel: LiveKernel) -> None:
    cell = kernel.run(
        "%%hvd_run\nimport numpy as np\nimport hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\n"
        "context.init()\n"
        f"if rank == 3:\n    {wait_for_ranks('called', 0, 1, 2)}\n    raise ValueError('bad')\n"
        "loss = hvd.allreduce_async(np.ones(3), name='loss'); open(f'called{rank}', 'w').close(); hvd.synchronize(loss)"
    )
    assert cell.error is not None
    text = _plain("\n".join(cell.error["traceback"]))
    assert text.startswith("rank 3 failed:")
    assert "ranks 0-2: stopped in allreduce `loss` because rank 3 failed" in text


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_a_syntax_error_is_told_once(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run\nx = 1\ny = (")
    assert cell.error is not None
    assert cell.error["ename"] == "SyntaxError"
    assert "line 3" in _plain("\n".join(cell.error["traceback"]))


def test_an_interrupt_stops_all_ranks_and_loses_nothing(kernel: LiveKernel) -> None:
    cell = kernel.send("%%hvd_run\nprint('begin')\ntime.sleep(3600)")
    kernel.until(lambda: "[0-3] begin" in cell.lines())
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert cell.error["evalue"] == "ranks 0-3 were interrupted"
    assert len(cell.of("error")) == 1
    assert kernel.run("%%hvd_run\nprint(x)").lines() == ["[0] 0", "[1] 10", "[2] 20", "[3] 30"]


def test_output_without_end_can_be_interrupted(kernel: LiveKernel) -> None:
    cell = kernel.send("%%hvd_run\nwhile True: print('rank', rank, 'x' * 80)")
    kernel.until(lambda: len(cell.lines()) > 1000)
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.run("%%hvd_run\nprint(1)").lines() == ["[0-3] 1"]


def test_a_new_number_keeps_the_variables_of_those_that_stay(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run -np 5\nprint('x' in globals())")
    told, *lines = cell.lines()
    assert told.startswith("rank 4 is new; it lacks rank, x")
    assert lines == ["[0-3] True", "[4] False"]
    kernel.run("%%hvd_run -np 3\npass")
    assert kernel.run("%%hvd_run\nprint(x)").lines() == ["[0] 0", "[1] 10", "[2] 20"]


def test_torch_distributed_is_switched_on_for_ranks_that_come_later_as_well(kernel: LiveKernel) -> None:
    get = "%%hvd_run\nprint(__import__('os').environ.get('HVDLAB_C10D'))"
    assert "make groups of hvdlab's" in kernel.run("%hvd_c10d on").text()
    assert "[0-3] 1" in kernel.run(get).text()
    kernel.run("%hvd_pool resize 5")
    assert "[0-4] 1" in kernel.run(get).text()
    assert "others are torch's own" in kernel.run("%hvd_c10d off").text()
    assert "[0-4] 0" in kernel.run(get).text()
    kernel.run("%hvd_pool resize 4\nimport os; del os.environ['HVDLAB_C10D']")


def test_ranks_can_be_chosen(kernel: LiveKernel) -> None:
    assert kernel.run("%%hvd_run --ranks ::2\nprint(1)").lines() == ["[0,2] 1"]
    assert kernel.run("%%hvd_rank 3\nprint(x)").lines() == ["30"]


def test_the_time_limit_ends_the_cell(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run --timeout 0.5\ntime.sleep(3600)")
    assert cell.error is not None
    assert cell.error["ename"] == "TimeoutError"


def test_a_background_cell_writes_to_its_own_place(kernel: LiveKernel) -> None:
    cell = kernel.run(
        f"%%hvd_run --background --out job\nprint('early')\n{wait_for('meanwhile')}\nprint('late')\nx"
    )
    other = kernel.run("print('meanwhile')")
    (kernel.directory / "meanwhile").touch()
    kernel.until(lambda: "[3] 30" in cell.lines())
    assert cell.lines()[:2] == ["[0-3] early", "[0-3] late"]
    assert other.lines() == ["meanwhile"]
    waited = kernel.run("print(list(job.wait()) if hasattr(job, 'wait') else list(job))")
    assert waited.lines() == ["[0, 10, 20, 30]"]


def test_a_background_cell_that_fails_says_so(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run --background\n1 / 0")
    kernel.until(lambda: "ZeroDivisionError" in cell.text("stderr"))
    assert _plain(cell.text("stderr")).startswith("ranks 0-3 failed with the same error:")


def test_the_report_of_a_death_names_the_last_collective_that_was_recorded(kernel: LiveKernel) -> None:
    kill = "%%hvd_run\nimport os, signal\nif os.environ['RANK'] == '3': os.kill(os.getpid(), signal.SIGKILL)"
    kernel.run(
        "%%hvd_run\nimport numpy as np\nimport hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\n"
        "context.init()\n"
        "hvd.allreduce(np.ones(3), name='grad')"
    )
    assert kernel.run("import hvdlab; recording = hvdlab.pool().client.gathered()").error is None
    cell = kernel.run(kill)
    assert cell.error is not None
    report = "\n".join(cell.error["traceback"])
    assert re.search(r"last seen in allreduce `grad`, cell \[\d+\] line 6", report), report
    assert kernel.run("%hvd_pool repair").error is None
    cell = kernel.run(kill)
    assert cell.error is not None
    assert "last seen" not in "\n".join(cell.error["traceback"]), "the process before had the rank then"
    assert kernel.run("%hvd_pool repair").error is None


def test_the_death_of_a_rank_is_told_and_repaired(kernel: LiveKernel) -> None:
    cell = kernel.run("%%hvd_run\nimport signal\nif rank == 3: os.kill(os.getpid(), signal.SIGKILL)")
    assert cell.error is not None
    assert cell.error["ename"] == "RankDied"
    assert "rank 3 died" in cell.error["evalue"]
    assert "SIGKILL" in cell.error["evalue"]
    report = _plain("\n".join(cell.error["traceback"]))
    assert re.search(r"peak memory \d+ MiB, not killed by the kernel", report)
    assert "the coordinator's decisions:" in report
    numbers = re.findall(r"^  (\d+) died rank 3; reason: ", report, re.MULTILINE)
    assert numbers, report
    assert len(re.findall(r"pid: (\d+)", report)) == len(numbers), "of one process"
    (story,) = kernel.run("%hvd_pool status --story --rank 3").of("execute_result")
    assert re.search(rf"^ *{numbers[0]} .* died ", story["data"]["text/plain"], re.MULTILINE), story
    assert "rank 3 is lost" in kernel.run("%%hvd_run\nprint(x)").lines()[0]
    (repaired,) = kernel.run("%hvd_pool repair").lines()
    assert re.fullmatch(
        r"rank 3 is back \(\d+\.\d s\); it lacks .*\brank, x\b.* and the modules os, sys, time\b.*: `%hvd_pool sync 3` brings it all that, "
        r"as `%%hvd_run --sync` does before its cell, or run your set-up cells on it with `%%hvd_rank 3`",
        repaired,
    ), repaired
    assert kernel.run("%%hvd_run\nprint('x' in globals())").lines() == ["[0-2] True", "[3] False"]


def test_variables_travel(kernel: LiveKernel) -> None:
    kernel.run("%hvd_pull x")
    assert kernel.run("print(x)").lines() == ["{0: 0, 1: 10, 2: 20, 3: 30}"]
    kernel.run("y = {'a': 1}\n%hvd_push y")
    assert kernel.run("%%hvd_run\nprint(y)").lines() == ["[0-3] {'a': 1}"]
    assert "UsageError" in kernel.run("%hvd_pull nothing_here").text("stderr")


def test_a_module_that_a_pulled_value_imports_is_named_once(kernel: LiveKernel) -> None:
    for name in ("pulled_class", "pulled_module", "pulled_in_vain"):
        (kernel.directory / f"{name}.py").write_text("class Point: pass\n")
    imports = "import sys; sys.path.insert(0, '')\nimport pulled_class, pulled_module, pulled_in_vain"
    values = (
        "p = [pulled_class.Point()] * 2\nm = {'module': pulled_module, 'list': p}\nv = pulled_in_vain.Point()"
    )
    assert kernel.run(f"%%hvd_run\n{imports}\n{values}").error is None
    assert kernel.run("%hvd_pull p").lines() == [
        "%hvd_pull p imported the module pulled_class into the notebook"
    ]
    assert kernel.run("%hvd_pull p").lines() == []
    lines = kernel.run("%hvd_pull m p").lines()
    assert lines == ["%hvd_pull m imported the module pulled_module into the notebook"]
    assert kernel.run("import sys; print(m[3]['module'] is sys.modules['pulled_module'])").lines() == ["True"]
    (kernel.directory / "pulled_in_vain.py").write_text("raise OSError('broken')\n")
    failed = kernel.run("%hvd_pull v")
    assert "UsageError: broken" in failed.text("stderr")
    assert failed.lines() == []


def test_completion_and_inspection_come_from_the_first_rank(kernel: LiveKernel) -> None:
    kernel.run("%%hvd_run\nonly_on_ranks = {'key': 1}")
    code = "%%hvd_run\nonly_on_r"
    reply: dict[str, Any] = {"matches": []}
    until = time.monotonic() + PATIENCE
    while not reply["matches"] and time.monotonic() < until:  # a rank has a second to answer
        kernel.client.complete(code, len(code))
        reply = kernel.client.get_shell_msg(timeout=PATIENCE)["content"]
    assert "only_on_ranks" in reply["matches"]
    assert code[reply["cursor_start"] : reply["cursor_end"]] == "only_on_r"
    code = "%%hvd_run\nonly_on_ranks"
    reply = {"found": False}
    while not reply["found"] and time.monotonic() < until:
        kernel.client.inspect(code, len(code))
        reply = kernel.client.get_shell_msg(timeout=PATIENCE)["content"]
    assert reply["found"]
    assert "dict" in reply["data"]["text/plain"]


def test_status_is_a_table(kernel: LiveKernel) -> None:
    (result,) = kernel.run("%hvd_pool status").of("execute_result")
    assert result["data"]["text/html"].count("<tr>") == 5
    started = kernel.run("%%hvd_run --background --out job\ntime.sleep(60)")
    label = f"[{started.reply['execution_count']}]"
    # A cell in the background goes on before the last rank has begun it.
    until, shown = time.monotonic() + PATIENCE, ""
    while shown.count(label) != 4 and time.monotonic() < until:
        (result,) = kernel.run("%hvd_pool status").of("execute_result")
        shown = result["data"]["text/plain"]
    assert shown.count(label) == 4
    kernel.run("job.interrupt()")
    assert kernel.run("job.wait()").error is not None


def test_a_timeline_is_written(kernel: LiveKernel) -> None:
    assert "can't be written: No such file" in kernel.run("%hvd_timeline start nowhere/run.json").text(
        "stderr"
    )
    (said,) = kernel.run("%hvd_timeline start run.json").lines()
    assert said.endswith("run.json; `%hvd_timeline stop` completes it")
    kernel.run(
        "%%hvd_run\nimport numpy as np\nimport hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\n"
        "context.init()\n"
        "hvd.allreduce(np.ones(3), name='loss')"
    )
    (said,) = kernel.run("%hvd_timeline stop").lines()
    assert re.search(r"wrote .*run\.json \(\d+ kB\)", said)
    kernel.run("import json\nevents = json.load(open('run.json'))")
    found = kernel.run("print(sorted({e['pid'] for e in events if e.get('name') == 'ALLREDUCE'}))")
    assert len(json.loads(found.text())) == 4
    assert "no timeline is being written" in kernel.run("%hvd_timeline").text()


def test_what_was_recorded_is_shown_saved_and_forgotten(kernel: LiveKernel) -> None:
    kernel.run(
        "%%hvd_run\nimport numpy as np\nimport hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\n"
        "context.init()\n"
        "for _ in range(5): hvd.allreduce(np.ones(3), name='loss')"
    )
    (said,) = kernel.run("%hvd_timeline save later.json").lines()
    assert re.fullmatch(r"wrote .*later\.json \(\d+ kB\); https://ui\.perfetto\.dev opens it", said)
    kernel.run("import json\nevents = json.load(open('later.json'))")
    found = kernel.run("print(sum(e['name'] == 'NEGOTIATE_ALLREDUCE' and e['ph'] == 'b' for e in events))")
    assert int(found.text()) >= 4 * 5
    site = kernel.run("print({e['args'].get('site') for e in events if e['name'] == 'ALLREDUCE'})").text()
    assert re.search(r"cell \[\d+\] line 6", site)

    shown = [one["data"] for one in kernel.run("%hvd_timeline show").of("display_data")]
    assert "4 ranks" in shown[0]["text/plain"]
    assert any("application/vnd.jupyter.widget-view+json" in one for one in shown)
    assert re.fullmatch(r"forgot \d+ spans; .*", kernel.run("%hvd_timeline clear").lines()[0])
    assert int(kernel.run("import hvdlab; print(len(hvdlab.trace()))").text()) == 0
    assert "say which file to write" in kernel.run("%hvd_timeline save").text("stderr")
    assert "says no format of a trace" in kernel.run("%hvd_timeline save x.txt").text("stderr")
    assert "takes no file" in kernel.run("%hvd_timeline clear x.json").text("stderr")
