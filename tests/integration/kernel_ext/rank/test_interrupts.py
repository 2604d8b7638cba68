"""An interrupt ends the cell it was meant for, and no other."""

from __future__ import annotations

import random
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from hvdlab.kernel_ext.wire.cells import CellDone
from support.patience import PATIENCE

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank


def interrupt_once_running(rank: Rank, source: str, **options: Any) -> Any:
    """Interrupt a cell that reports by ``started.set()`` that it is at the place of the interrupt."""
    started = threading.Event()
    rank.shell.user_ns["started"] = started
    ran = []

    def script(pool: Pool) -> None:
        cell = pool.start(source, **options)
        assert started.wait(PATIENCE)
        pool.engine.interrupt()
        ran.append(pool.finish(cell))

    rank.play(script)
    return ran[0]


LOOPS = {
    "python": "started.set()\nwhile True:\n    pass",
    "sleep": "import time\nstarted.set()\ntime.sleep(1000)",
    "lock": "import threading\nstarted.set()\nthreading.Event().wait()",
    "printing": "started.set()\nwhile True:\n    print('x' * 100)",
    "await": "import asyncio\nstarted.set()\nawait asyncio.sleep(1000)",
    "await a task": (
        "import asyncio\nasync def deep():\n    started.set()\n    await asyncio.Event().wait()\n"
        "await asyncio.gather(deep(), asyncio.sleep(1000))"
    ),
    "async loop": "import asyncio\nstarted.set()\nwhile True:\n    await asyncio.sleep(0)",
    "subprocess": (
        "import subprocess\np = subprocess.Popen(['sleep', '1000'])\n"
        "try:\n    started.set()\n    p.wait()\nfinally:\n    p.kill()\n    p.wait()"
    ),
    "repr": "class R:\n    def __repr__(self):\n        started.set()\n        while True: pass\nR()",
}


def test_code_that_exits_when_it_is_interrupted_was_interrupted(rank: Rank) -> None:
    source = """
        import sys
        try:
            started.set()
            while True: pass
        except KeyboardInterrupt:
            sys.exit(1)
    """
    assert interrupt_once_running(rank, textwrap.dedent(source)).error.ename == "KeyboardInterrupt"


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_interrupts_reach_the_cell(rank: Rank, source: str) -> None:
    ran = interrupt_once_running(rank, source)
    assert ran.error.ename == "KeyboardInterrupt"
    assert ran.error.interrupted
    assert dict(rank.engine.log)["end"] == "KeyboardInterrupt"
    assert rank.run("'alive'").done.value_repr == "'alive'"


def test_an_interrupt_ends_a_shell_command(rank: Rank) -> None:
    # Not while the command is being started: pexpect loses a pipe to an interrupt then, also when the command runs already.
    # IPython passes the interrupt on to the command, and the cell goes on.
    interrupt_once_running(
        rank,
        "import sys, threading, traceback\n"
        "def watch(main=threading.main_thread().ident):\n"
        "    while 'expect_loop' not in {call.name for call in traceback.extract_stack(sys._current_frames()[main])}: pass\n"
        "    started.set()\n"
        "watching = threading.Thread(target=watch)\nwatching.start()\n"
        "!sleep 1000\n"
        "watching.join()",
    )
    assert rank.run("'alive'").done.value_repr == "'alive'"


def test_the_traceback_of_an_interrupt_ends_in_the_cell(rank: Rank) -> None:
    ran = interrupt_once_running(rank, "def f():\n    started.set()\n    while True: pass\nf()", label="[7]")
    text = "\n".join(ran.error.traceback)
    assert "Cell In[7], line 4, in f()" in text
    assert "interrupts" not in text


def test_an_awaiting_cell_may_handle_its_interrupt(rank: Rank) -> None:
    ran = interrupt_once_running(
        rank,
        "import asyncio\ntry:\n    started.set()\n    await asyncio.sleep(1000)\n"
        "except KeyboardInterrupt:\n    await asyncio.sleep(0)\n    x = 'handled'\nx",
    )
    assert ran.done.error is None
    assert ran.done.value_repr == "'handled'"


def test_a_handled_interrupt_leaves_room_for_the_next(rank: Rank) -> None:
    again = rank.shell.user_ns["again"] = threading.Event()
    started = rank.shell.user_ns["started"] = threading.Event()

    def script(pool: Pool) -> None:
        cell = pool.start(
            "try:\n    started.set()\n    while True: pass\nexcept KeyboardInterrupt:\n    again.set()\nwhile True: pass"
        )
        assert started.wait(PATIENCE)
        pool.engine.interrupt()
        assert again.wait(PATIENCE)
        pool.engine.interrupt()
        assert pool.finish(cell).error.interrupted

    rank.play(script)


def test_an_interrupt_right_behind_a_cell_is_for_that_cell(rank: Rank) -> None:
    """The cell has come, but the main thread may not have begun it: the interrupt must not be lost."""

    def script(pool: Pool) -> None:
        for _ in range(20):
            cell = pool.start("while True:\n    pass")
            pool.engine.interrupt()
            assert pool.finish(cell).error.interrupted
            assert pool.run("1 + 1").done.error is None

    rank.play(script)


def test_an_interrupt_between_cells_is_dropped(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        for _ in range(20):
            pool.engine.interrupt()
            pool.engine.settle()
            assert pool.run("1").done.error is None

    rank.play(script)


def at(rank: Rank, point: str, hit: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``hit`` on the main thread at a point of the next cell's life."""
    runner, shell = rank.agent._runner, rank.shell

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            hit()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    match point:
        case "before it begins":
            before(rank.agent._capture, "begin_cell")
        case "while it is compiled":
            before(shell, "transform_cell")
        case "before its first statement":
            before(shell, "run_ast_nodes")
        case "while its end is reported":
            before(runner, "_end_for_others")
        case "while its last output is sent":
            before(rank.agent._capture, "flush")


@pytest.mark.parametrize("point", ["while it is compiled", "before its first statement"])
def test_an_early_interrupt_is_kept_for_the_cell(
    rank: Rank, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(rank, point, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    ran = rank.run("while True:\n    pass")
    assert ran.error.interrupted
    monkeypatch.undo()
    assert rank.run("1").done.error is None


@pytest.mark.parametrize("point", ["while its end is reported", "while its last output is sent"])
@pytest.mark.parametrize("source", ["1", "1 / 0"])
def test_a_late_interrupt_is_dropped(
    rank: Rank, point: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(rank, point, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    ran = rank.run(source)
    assert ran.done.error is None or not ran.done.error.interrupted
    monkeypatch.undo()
    assert rank.run("2").done.value_repr == "2"


def test_an_interrupt_between_statements_ends_the_cell(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    run_code = rank.agent._runner._run_code
    count = []

    async def wrapped(*args: Any, **kwargs: Any) -> bool:
        failed = await run_code(*args, **kwargs)
        count.append(failed)
        if len(count) == 1:
            signal.raise_signal(signal.SIGINT)
        return failed

    monkeypatch.setattr(rank.agent._runner, "_run_code", wrapped)
    ran = rank.run("x = 1\nx = 2\nx = 3")
    assert ran.error.interrupted
    assert rank.shell.user_ns["x"] == 1


def test_a_signal_that_is_late_does_not_hit_the_next_cell(rank: Rank) -> None:
    rank.shell.user_ns["started"], rank.shell.user_ns["go"] = started, go = (
        threading.Event(),
        threading.Event(),
    )

    def script(pool: Pool) -> None:
        first = pool.start(
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])\nstarted.set()\ngo.wait()"
        )
        assert started.wait(PATIENCE)
        pool.engine.interrupt()
        pool.engine.settle()
        go.set()
        assert pool.finish(first).done.error is None
        ran = pool.run(
            "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])\nfor _ in range(1000): pass\n'unharmed'"
        )
        assert ran.done.value_repr == "'unharmed'"

    rank.play(script)


SPIN = "    started.set()\n    while True: pass\n"
FINALIZERS = {
    "del": f"class C:\n  def __del__(self):\n{SPIN}def last(): C()\n",
    "weakref callback": (
        f"import weakref\nclass C: pass\ndef gone(ref):\n{SPIN}def last():\n  c = C()\n  r = weakref.ref(c, gone)\n  del c\n"
    ),
    "collection": (
        f"import gc\nclass C:\n  def __del__(self):\n{SPIN}"
        "def last():\n  c = C()\n  c.me = c\n  del c\n  gc.collect()\n"
    ),
    "generator": f"def g():\n  try: yield\n  finally:\n{SPIN}def last():\n  next(g())\n",
}


MESSAGES = """
    import signal, time
    from types import SimpleNamespace
    from hvdlab.collectives.engine.entries import CompletionHooks
    from hvdlab.collectives.engine.locked_state import LockedState
    from hvdlab.collectives.protocol.messages import Ping

    class Endpoint:
        backlog, sent = 0, []
        def send_all(self, messages):
            signal.raise_signal(signal.SIGINT)
            self.sent += messages
            return True

    control = SimpleNamespace(wake=lambda: None)
    state = LockedState(0, Endpoint(), control, CompletionHooks(0, control))
    state.queue_message(Ping(1))
    try:
        state.flush()
        time.sleep(3600)
    except KeyboardInterrupt:
        print(Endpoint.sent, state._update_in_progress)
"""


def test_an_interrupt_while_messages_are_sent_waits_until_they_are(rank: Rank) -> None:
    assert rank.run(textwrap.dedent(MESSAGES)).text() == "[Ping(number=1, after_events=False)] False\n"


@pytest.mark.parametrize("source", FINALIZERS.values(), ids=FINALIZERS)
def test_an_interrupt_that_hits_a_finalizer_ends_the_cell_all_the_same(rank: Rank, source: str) -> None:
    """The interpreter drops a finalizer's exceptions: the rank would go on for ever."""
    ran = interrupt_once_running(rank, source + "last()\nwhile True: pass")
    assert ran.error.interrupted
    assert ran.text("stderr") == ""
    assert rank.run("'alive'").done.value_repr == "'alive'"


def test_an_interrupt_is_repeated_through_one_finalizer_after_the_other(rank: Rank) -> None:
    ran = interrupt_once_running(
        rank, FINALIZERS["del"] + "def many():\n  for _ in range(5): last()\nmany()\nwhile 1: pass"
    )
    assert ran.error.interrupted


def test_an_interrupt_lost_in_a_cells_last_finalizer_does_not_hit_the_next_cell(rank: Rank) -> None:
    started = rank.shell.user_ns["started"] = threading.Event()

    def script(pool: Pool) -> None:
        for _ in range(10):
            started.clear()
            cell = pool.start(FINALIZERS["del"] + "last()")
            assert started.wait(PATIENCE)
            pool.engine.interrupt()
            pool.finish(cell)
            assert pool.run("for _ in range(10000): pass\n'unharmed'").done.value_repr == "'unharmed'"

    rank.play(script)


def test_what_finalizers_raise_themselves_goes_to_the_hook_of_the_user(rank: Rank) -> None:
    hook = sys.unraisablehook
    try:
        ran = rank.run(
            "import sys\nseen = []\nbefore = sys.unraisablehook\n"
            "sys.unraisablehook = lambda lost: seen.append(type(lost.exc_value).__name__)\n"
            "class C:\n  def __del__(self): raise KeyboardInterrupt\nC() and None\nseen"
        )
        assert ran.done.value_repr == "['KeyboardInterrupt']"
        ran = rank.run("seen.clear()\nC() and None\nseen")  # the gate is in front of the hook again
        assert ran.done.value_repr == "['KeyboardInterrupt']"
    finally:
        sys.unraisablehook = hook


def test_a_hook_that_calls_the_one_it_replaced_is_no_circle(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = rank.shell.user_ns["seen"] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: seen.append("first"))
    rank.run(
        "import sys\nclass C:\n  def __del__(self): raise ValueError\n"
        "def mine(lost, before=sys.unraisablehook):\n  seen.append('mine')\n  before(lost)\n"
        "sys.unraisablehook = mine"
    )
    assert rank.run("C() and None\nseen").done.value_repr == "['mine', 'first']"


def test_an_interrupt_ends_the_drawing_of_figures(rank: Rank) -> None:
    started = threading.Event()

    def draw() -> None:
        started.set()
        while True:
            pass

    rank.shell.events.register("post_execute", draw)
    try:

        def script(pool: Pool) -> None:
            cell = pool.start("1")
            assert started.wait(PATIENCE)
            pool.engine.interrupt()
            assert "KeyboardInterrupt" in pool.finish(cell).text("stderr")

        rank.play(script)
    finally:
        rank.shell.events.unregister("post_execute", draw)


def test_an_interrupt_ends_the_pickling_of_a_value(rank: Rank) -> None:
    ran = interrupt_once_running(
        rank,
        "class Slow:\n    def __reduce__(self):\n        started.set()\n        while True: pass\n"
        "    def __repr__(self):\n        return 'slow'\nSlow()",
    )
    assert ran.done.error is None
    assert ran.done.value is None
    assert "interrupted" in ran.done.value_note


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_a_storm_of_interrupts_loses_nothing(rank: Rank, seed: int) -> None:
    chance = random.Random(seed)
    sources = [
        "x = 1",
        "for _ in range(300): print('x')",
        "import asyncio; await asyncio.sleep(0)",
        "sum(range(10000))",
    ]

    def script(pool: Pool) -> None:
        outcomes = []
        for _ in range(40):
            cells = [pool.start(chance.choice(sources)) for _ in range(chance.randrange(1, 4))]
            for _ in range(chance.randrange(4)):
                pool.engine.interrupt()
            if chance.random() < 0.3:
                pool.engine.settle()
            for cell in cells:
                if chance.random() < 0.3:
                    pool.engine.interrupt()
                done: CellDone = pool.finish(cell).done
                assert done.error is None or done.error.interrupted
                outcomes.append(done.error)
        pool.engine.settle()
        assert pool.run("'alive'").done.value_repr == "'alive'"

    rank.play(script)
    ends = [name for name, _ in rank.engine.log]
    assert ends.count("begin") == ends.count("end") == ends.count("CellDone")


TORN = """
import signal, sys, torch
calls = []
def trace(frame, event, argument):
    if frame.f_code.co_name == {name!r} and frame.f_code.co_filename.endswith({file!r}):
        calls.append(frame.f_code)
        if len(calls) == {call}:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
sys.settrace(trace)
{block}
"""
"""An interrupt as a function of torch's is called for the ``call``-th time."""

OPTIMIZER = "torch.optim.SGD([torch.zeros(1)], differentiable={enables}).step()"


@pytest.mark.parametrize(
    ("name", "file", "call", "block"),
    [
        pytest.param("__exit__", "grad_mode.py", 1, "with {switch}(): pass", id="with"),
        pytest.param("__exit__", "grad_mode.py", 1, "@{switch}()\ndef f(): pass\nf()", id="decorator"),
        pytest.param("graph_break", "decorators.py", 2, OPTIMIZER, id="optimizer"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_gradients_are_as_before_when_torch_was_interrupted_while_it_switched_them(
    rank: Rank, before: bool, name: str, file: str, call: int, block: str
) -> None:
    torch = pytest.importorskip("torch")
    rank.run(f"import torch; torch.set_grad_enabled({before})")
    try:
        block = block.format(switch="torch.no_grad" if before else "torch.enable_grad", enables=not before)
        error = rank.run(TORN.format(name=name, file=file, call=call, block=block)).error
        assert error.ename == "KeyboardInterrupt"
        assert rank.run("torch.is_grad_enabled()").done.value_repr == str(before)
    finally:
        torch.set_grad_enabled(True)


STEPS = """
def outcome():
    weight, seen = torch.ones(2, 2, requires_grad=True), []
    for _ in range(3):
        with torch.autocast('cpu', torch.bfloat16):
            seen.append((torch.ones(2, 2) @ weight).sum().item())
        with torch.no_grad():
            weight += 1
    return seen
outcome()
"""


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_autocast_is_as_before_when_it_was_interrupted_while_it_was_switched(rank: Rank, name: str) -> None:
    torch = pytest.importorskip("torch")
    block = "with torch.autocast('cpu'): torch.ones(2, 2) @ torch.ones(2, 2, requires_grad=True)"
    try:
        error = rank.run(TORN.format(name=name, file="autocast_mode.py", call=1, block=block)).error
        assert error.ename == "KeyboardInterrupt"
        assert rank.run("torch.is_autocast_enabled('cpu')").done.value_repr == "False"
        # A context that has never ended would keep the weights of the first step for all others.
        assert rank.run(STEPS).done.value_repr == "[8.0, 16.0, 24.0]"
        assert torch.autocast_increment_nesting() == 1
    finally:
        while torch.autocast_decrement_nesting() > 0:
            pass
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


def test_what_an_interrupted_cell_has_switched_itself_stays(rank: Rank) -> None:
    torch = pytest.importorskip("torch")
    try:
        source = "import signal, torch\ntorch.set_grad_enabled(False)\nsignal.raise_signal(signal.SIGINT)"
        assert rank.run(source).error.ename == "KeyboardInterrupt"
        assert rank.run("torch.is_grad_enabled()").done.value_repr == "False"
    finally:
        torch.set_grad_enabled(True)
