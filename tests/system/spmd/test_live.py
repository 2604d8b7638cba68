"""The kernel with two ranks, as clients see it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ipykernel import version_info as ipykernel_version  # type: ignore[attr-defined]  # it has no __all__

from support.jupyter.debugging_client import Debugging
from support.jupyter.live_kernel import Cell, LiveKernel
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share

needs_a_thread_for_messages = pytest.mark.skipif(
    ipykernel_version < (7,),
    reason="before ipykernel 7 the thread that runs cells takes the messages, so that questions wait for the cell",
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    kernel = LiveKernel(tmp_path_factory.mktemp("kernel"), name="hvdlab")
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(started: LiveKernel) -> LiveKernel:
    """Return a kernel whose ranks know ``rank``."""
    cell = started.run("import os, sys, time\nrank = int(os.environ['RANK'])")
    assert cell.error is None, cell.error
    return started


def ask(kernel: LiveKernel, msg_id: str) -> dict[str, Any]:
    """Return the answer to a request, which may come before that of a running cell."""
    while True:
        reply = kernel.client.get_shell_msg(timeout=30)
        if reply["parent_header"]["msg_id"] == msg_id:
            return dict(reply["content"])
        if (owner := kernel.cells.get(reply["parent_header"]["msg_id"])) is not None:
            owner.reply = reply["content"]


def ask_until(
    kernel: LiveKernel, question: Callable[[], str], answered: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Ask until ranks have answered in time: on a busy machine the kernel may do without them."""
    deadline = time.monotonic() + 60
    while not answered(answer := ask(kernel, question())):
        assert time.monotonic() < deadline, answer
    return answer


def from_ranks(inspected: dict[str, Any]) -> bool:
    return "does not answer" not in inspected["data"].get("text/plain", "")


def value(cell: Cell) -> str:
    (result,) = cell.of("execute_result")
    return str(result["data"]["text/plain"])


def test_cells_run_on_all_ranks_and_show_once_what_they_agree_on(kernel: LiveKernel) -> None:
    assert kernel.run("print('hello')").lines() == ["[0,1] hello"]
    assert value(kernel.run("6 * 7")) == "42"
    assert value(kernel.run("rank")) == "[0] 0\n[1] 1"
    assert value(kernel.run("_ + 1, __")) == "[0] (1, 42)\n[1] (2, 42)"


def test_a_display_that_ranks_agree_on_has_no_label(kernel: LiveKernel) -> None:
    cell = kernel.run("from IPython.display import HTML, display\ndisplay(HTML('<b>here</b>'))")
    assert [d["data"]["text/html"] for d in cell.of("display_data")] == ["<b>here</b>"]
    cell = kernel.run("display(HTML(f'<b>{rank}</b>'))")
    shown = [d["data"]["text/html"] for d in cell.of("display_data")]
    assert len(shown) == 4
    assert "rank 0" in shown[0]


def test_local_cells_run_in_the_kernel(kernel: LiveKernel) -> None:
    kernel.run("%%local\nhere = 'kernel'")
    assert value(kernel.run("%%local\nhere, 'rank' in globals()")) == "('kernel', False)"
    assert kernel.run("here").reply["ename"] == "NameError"


def test_some_ranks_and_their_magics(kernel: LiveKernel) -> None:
    assert kernel.run("%%hvd_rank 1\nprint(rank)").lines() == ["1"]
    timed = kernel.run("%%time\nx = rank")
    assert any("Wall time" in line for line in timed.lines())
    assert value(kernel.run("x")) == "[0] 0\n[1] 1"


def test_control_lines_run_here_and_the_rest_on_the_ranks(kernel: LiveKernel) -> None:
    cell = kernel.run("%hvd_pool resize 3\nint(os.environ['WORLD_SIZE']) if 'os' in globals() else 3")
    ready, synced = cell.lines()
    assert ready == "ranks 0-2 are ready"
    assert synced.startswith("rank 2 has what rank 0 knows: ")
    assert value(cell) == "3"
    cell = kernel.run("%hvd_pool resize 2\nx = 1\n1 / 0")
    assert "line 3" in "\n".join(cell.reply["traceback"])


def test_a_client_may_say_how_many_ranks_with_a_cell(kernel: LiveKernel) -> None:
    session = kernel.client.session
    content = {"code": "import os\nint(os.environ['WORLD_SIZE'])", "silent": False, "store_history": True}
    message = session.msg("execute_request", {**content, "user_expressions": {}, "allow_stdin": False})
    message["metadata"] = {"hvdlab": {"np": 3}}
    cell = kernel.cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"], time.monotonic())
    kernel.client.shell_channel.send(message)
    kernel.finish(cell)
    assert value(cell) == "3"
    assert kernel.run("%hvd_pool resize 2").lines() == [
        "rank 2 has ended, with its variables",
        "ranks 0,1 are ready",
    ]


def test_an_error_is_the_root_cause(kernel: LiveKernel) -> None:
    cell = kernel.run("if rank == 1:\n    raise ValueError('bad batch')")
    assert (cell.reply["status"], cell.reply["ename"], cell.reply["evalue"]) == (
        "error",
        "ValueError",
        "bad batch",
    )
    assert "rank 1" in "\n".join(cell.reply["traceback"])
    assert "line 2" in "\n".join(cell.reply["traceback"])


def go_on(kernel: LiveKernel, name: str) -> None:
    """Let a cell go on that waits for a file, once the kernel has received all that was sent after that cell."""
    if ipykernel_version >= (7,):
        # It is answered while the cell runs, and what is sent on one connection comes in order.
        ask(kernel, kernel.client.is_complete("1"))
    (kernel.directory / name).touch()


def test_what_was_sent_after_an_error_is_not_run(kernel: LiveKernel) -> None:
    fails = "while not os.path.exists({!r}): time.sleep(0.01)\n1 / 0"
    first, second = kernel.send(fails.format("first")), kernel.send("never = 1")
    go_on(kernel, "first")
    kernel.finish(first)
    kernel.finish(second)
    assert second.reply["status"] == "aborted"
    failing, third = kernel.send(fails.format("failing"), stop_on_error=False), kernel.send("3")
    go_on(kernel, "failing")
    kernel.finish(failing)
    kernel.finish(third)
    assert value(third) == "3"


def test_expressions_are_evaluated_on_the_first_rank(kernel: LiveKernel) -> None:
    reply = kernel.run("y = rank + 5", user_expressions={"y": "y", "bad": "no_such"}).reply
    assert reply["user_expressions"]["y"]["data"] == {"text/plain": "5"}
    assert reply["user_expressions"]["bad"]["ename"] == "NameError"


def test_counts_and_history_are_the_notebooks(kernel: LiveKernel) -> None:
    before = kernel.run("1").reply["execution_count"]
    assert kernel.run("2", store_history=False).reply["execution_count"] == before
    silent = kernel.run("z = 5", silent=True)
    assert silent.of("execute_input") == []
    assert kernel.run("z").reply["execution_count"] == before + 1
    reply = ask(kernel, kernel.client.history(hist_access_type="tail", n=2, raw=True, output=False))
    assert [entry[2] for entry in reply["history"]] == ["1", "z"]
    assert value(kernel.run(f"Out[{before + 1}]")) == "5"


def test_completion_and_inspection_come_from_the_first_rank(kernel: LiveKernel) -> None:
    kernel.run("def on_ranks_only(batch):\n    'What ranks do.'")
    completed = ask_until(
        kernel, lambda: kernel.client.complete("on_ranks"), lambda told: bool(told["matches"])
    )
    assert completed["matches"] == ["on_ranks_only"]
    shown = ask_until(kernel, lambda: kernel.client.inspect("on_ranks_only"), from_ranks)
    assert "What ranks do." in shown["data"]["text/plain"]
    assert "%hvd_pool" in ask(kernel, kernel.client.complete("%hvd_p"))["matches"]
    assert ask(kernel, kernel.client.complete("%%loc"))["matches"] == ["%%local"]
    assert {"%time", "%%time"} <= set(ask(kernel, kernel.client.complete("%tim"))["matches"])
    payload = kernel.run("on_ranks_only?").reply["payload"]
    assert [one["source"] for one in payload] == ["page"]
    assert "What ranks do." in payload[0]["data"]["text/plain"]
    assert kernel.run("no_such_thing?").lines() == ["Object `no_such_thing` not found."]


@needs_a_thread_for_messages
def test_questions_are_answered_while_a_cell_runs(kernel: LiveKernel) -> None:
    kernel.run("def on_ranks_only(batch):\n    'What ranks do.'")
    busy = kernel.send("while True: time.sleep(0.01)")
    kernel.until(lambda: busy.of("execute_input"))
    completed = ask_until(
        kernel, lambda: kernel.client.complete("on_ranks"), lambda told: bool(told["matches"])
    )
    assert completed["matches"] == ["on_ranks_only"]
    shown = ask_until(kernel, lambda: kernel.client.inspect("on_ranks_only"), from_ranks)
    assert "What ranks do." in shown["data"]["text/plain"]
    assert ask(kernel, kernel.client.is_complete("for x in y:"))["status"] == "incomplete"
    assert ask(kernel, kernel.client.kernel_info())["implementation"] == "hvdlab"
    assert not busy.reply
    kernel.interrupt()
    kernel.finish(busy)
    assert busy.reply["ename"] == "KeyboardInterrupt"
    assert value(kernel.run("rank")) == "[0] 0\n[1] 1"


@needs_a_thread_for_messages
def test_questions_right_behind_a_cell_do_not_wait_for_its_end(kernel: LiveKernel) -> None:
    kernel.run("def on_ranks_only(batch):\n    'What ranks do.'")
    busy = kernel.send("while True: time.sleep(0.01)")
    assert ask(kernel, kernel.client.is_complete("for x in y:"))["status"] == "incomplete"
    last = kernel.send("never = 1")
    completed = ask_until(
        kernel, lambda: kernel.client.complete("on_ranks"), lambda told: bool(told["matches"])
    )
    assert completed["matches"] == ["on_ranks_only"]
    assert not busy.reply
    kernel.until(lambda: busy.of("execute_input"))
    kernel.interrupt()
    kernel.finish(busy)
    kernel.finish(last)
    assert last.reply["status"] == "aborted"
    assert value(kernel.run("rank")) == "[0] 0\n[1] 1"
    # No cell is left that questions would be taken around: the kernel's own answers come again.
    assert "%hvd_pool" in ask(kernel, kernel.client.complete("%hvd_p"))["matches"]


@needs_a_thread_for_messages
def test_a_rank_whose_interpreter_is_held_is_said_to_be_silent(kernel: LiveKernel) -> None:
    # A call of such a library keeps the interpreter to itself; this one as long as the test asks.
    kernel.run("import ctypes\nkeeping = ctypes.PyDLL(None)")
    held, release = kernel.directory / "held", kernel.directory / "release"
    code = b"touch held; timeout 60 sh -c 'while [ ! -e release ]; do sleep 0.02; done'"
    busy = kernel.send(f"if rank == 0: keeping.system({code!r})")
    kernel.until(lambda: busy.of("execute_input"))
    deadline = time.monotonic() + 60
    while not held.exists():
        assert time.monotonic() < deadline, busy.messages
        time.sleep(0.01)
    answer = ask(kernel, kernel.client.inspect("rank"))
    assert not from_ranks(answer)
    assert not busy.reply
    release.touch()
    kernel.finish(busy)
    assert busy.error is None, busy.error
    ask_until(kernel, lambda: kernel.client.inspect("rank"), from_ranks)


def test_autohvd_has_no_meaning_here(kernel: LiveKernel) -> None:
    assert "cells run on the ranks anyway" in kernel.run("%autohvd off").text("stderr")


SLIDER = """\
import ipywidgets
slider = ipywidgets.IntSlider(value=rank)
slider.observe(lambda change: globals().update(seen=change['new']), 'value')
slider"""
VIEW = "application/vnd.jupyter.widget-view+json"


def test_widgets_of_ranks_are_shown_and_hear_the_frontend(kernel: LiveKernel) -> None:
    cell = kernel.run(SLIDER)
    assert cell.error is None, cell.error
    opened = {one["comm_id"]: one["data"]["state"] for one in cell.of("comm_open")}
    views = [one["data"][VIEW]["model_id"] for one in cell.of("display_data") if VIEW in one["data"]]
    assert [opened[view]["value"] for view in views] == [0, 1]

    update = {"method": "update", "state": {"value": 42}, "buffer_paths": []}
    message = kernel.client.session.msg("comm_msg", {"comm_id": views[1], "data": update})
    kernel.client.shell_channel.send(message)
    kernel.until(lambda: any(kind == "comm_msg" for _, kind, _ in kernel.others))  # it echoes its input
    assert value(kernel.run("slider.value, globals().get('seen')")) == "[0] (0, None)\n[1] (42, 42)"

    moved = kernel.run("slider.value = 7")
    sent = {one["comm_id"]: one["data"]["state"] for one in moved.of("comm_msg")}
    assert sent == {view: {"value": 7} for view in views}


def asked_states(kernel: LiveKernel) -> tuple[dict[str, Any], dict[tuple[str, ...], bytes]]:
    """Return the states of all widgets, and their buffers, as a reopened page receives them."""
    session, send = kernel.client.session, kernel.client.shell_channel.send
    control = {"comm_id": uuid.uuid4().hex, "target_name": "jupyter.widget.control", "data": {}}
    send(session.msg("comm_open", control, metadata={"version": "1.0.0"}))
    send(session.msg("comm_msg", {"comm_id": control["comm_id"], "data": {"method": "request_states"}}))
    answers: list[dict[str, Any]] = []
    while not answers:
        message = kernel.client.get_iopub_msg(timeout=30)
        if message["content"].get("comm_id") == control["comm_id"]:
            answers.append(message)
    assert answers[0]["msg_type"] == "comm_msg", answers
    data = answers[0]["content"]["data"]
    assert data["method"] == "update_states"
    paths = map(tuple, data["buffer_paths"])
    return data["states"], dict(zip(paths, map(bytes, answers[0]["buffers"]), strict=True))


def test_a_page_that_is_opened_anew_gets_the_states_of_ranks_widgets(kernel: LiveKernel) -> None:
    cell = kernel.run(f"{SLIDER}\npicture = ipywidgets.Image(value=bytes([rank, 255]))")
    opened = {one["comm_id"]: one["data"]["state"] for one in cell.of("comm_open")}
    sliders = sorted(
        (state["value"], comm) for comm, state in opened.items() if state["_model_name"] == "IntSliderModel"
    )
    pictures = [comm for comm, state in opened.items() if state["_model_name"] == "ImageModel"]
    kernel.run("%%local\nimport ipywidgets\nmine = ipywidgets.IntSlider(value=99)")
    kernel.run("if rank == 0: slider.value = 7")
    update = {"method": "update", "state": {"value": 8}, "buffer_paths": []}
    kernel.client.shell_channel.send(
        kernel.client.session.msg("comm_msg", {"comm_id": sliders[1][1], "data": update})
    )
    states, buffers = asked_states(kernel)
    assert [states[comm]["state"]["value"] for _, comm in sliders] == [7, 8]
    assert states[sliders[0][1]]["model_name"] == "IntSliderModel"
    assert {buffers[comm, "state", "value"] for comm in pictures} == {b"\0\xff", b"\1\xff"}
    assert 99 in [one["state"].get("value") for one in states.values()]
    kernel.run("slider.close(); picture.close()")
    assert not ({comm for _, comm in sliders} | set(pictures)) & set(asked_states(kernel)[0])


def test_what_a_widgets_callback_prints_is_shown_under_its_cell(kernel: LiveKernel) -> None:
    cell = kernel.run(
        "import ipywidgets\nbutton = ipywidgets.Button()\n"
        "button.on_click(lambda button: (print('pressed'), 1 / 0))\nbutton"
    )
    views = [one["data"][VIEW]["model_id"] for one in cell.of("display_data") if VIEW in one["data"]]
    press = {"method": "custom", "content": {"event": "click"}}
    kernel.client.shell_channel.send(
        kernel.client.session.msg("comm_msg", {"comm_id": views[1], "data": press})
    )
    kernel.until(lambda: "ZeroDivisionError" in cell.text("stderr"))
    assert cell.lines() == ["[1] pressed"]
    assert value(kernel.run("rank")) == "[0] 0\n[1] 1"


def test_an_output_widget_catches_what_a_callback_prints_shows_and_raises(kernel: LiveKernel) -> None:
    cell = kernel.run(
        "import ipywidgets\nout, button = ipywidgets.Output(), ipywidgets.Button()\n"
        "def press(button):\n"
        "    with out:\n"
        "        print('pressed'); display('shown'); 1 / 0\n"
        "    print('outside')\n"
        "button.on_click(press)\nbutton"
    )
    views = [one["data"][VIEW]["model_id"] for one in cell.of("display_data") if VIEW in one["data"]]
    press = {"method": "custom", "content": {"event": "click"}}
    kernel.client.shell_channel.send(
        kernel.client.session.msg("comm_msg", {"comm_id": views[1], "data": press})
    )
    kernel.until(lambda: bool(cell.lines()))
    assert (cell.lines(), cell.text("stderr")) == (["[1] outside"], "")
    code = "print([one.get('text') or one['data']['text/plain'] for one in out.outputs])"
    empty, caught = kernel.run(code).lines()
    assert empty == "[0] []"
    assert caught.startswith("[1] ['pressed\\n', \"'shown'\", ")
    assert "ZeroDivisionError" in caught


def test_a_rank_asks_the_user(kernel: LiveKernel) -> None:
    cell = kernel.send("%%hvd_rank 1\nname = input('name? ')\nprint('hello', name)", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=30)["content"]["prompt"] == "[rank 1] name? "
    kernel.client.input("you")
    kernel.finish(cell)
    assert cell.lines()[-1] == "hello you"
    refused = kernel.run("input('?')", allow_stdin=False)
    assert refused.reply["ename"] == "StdinNotImplementedError"


def test_the_frontends_debugger_stops_in_plain_cells_on_the_ranks_and_in_local_ones_here(
    kernel: LiveKernel,
) -> None:
    code = "step = rank * 10\nafter = step + 1"
    debugging = Debugging(kernel)
    debugging.switch_on()
    debugging.set_breakpoints(code, 2)
    cell = kernel.send(code)
    frames = {one["name"]: one for one in debugging.frames(debugging.stopped(2)[0])}
    for rank in (0, 1):
        frame = frames[f"rank {rank}: <module>"]
        assert frame["line"] == 2
        assert debugging.variables(frame["id"])["step"] == str(rank * 10)
    debugging.ask("continue", threadId=1)
    kernel.finish(cell)
    assert cell.error is None, cell.error

    code = "%%local\nhere = 1\nprint(here)"
    debugging.set_breakpoints(code, 3)
    cell = kernel.send(code)
    event = debugging.wait(lambda one: one["event"] == "stopped")
    assert debugging.frames(event["body"]["threadId"])[0]["line"] == 3
    debugging.ask("continue", threadId=event["body"]["threadId"])
    kernel.finish(cell)
    assert cell.lines() == ["1"]
    debugging.switch_off()
    assert value(kernel.run("after")) == "[0] 1\n[1] 11"


def test_new_ranks_know_what_the_others_know(kernel: LiveKernel) -> None:
    kernel.run("import numpy as np\nheld = np.arange(3)\ndef tripled(): return held * 3")
    ready, synced, *failed = kernel.run("%hvd_pool resize 3").lines()
    assert ready == "ranks 0-2 are ready"
    assert synced.startswith("rank 2 has what rank 0 knows: ")
    assert all(line.startswith("not brought: ") for line in failed)
    assert value(kernel.run("tripled().tolist()")) == "[0, 3, 6]"
    assert kernel.run("%hvd_pool resize 2").lines() == [
        "rank 2 has ended, with its variables",
        "ranks 0,1 are ready",
    ]
