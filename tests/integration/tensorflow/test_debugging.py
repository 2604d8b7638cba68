"""Prompts and debuggers in cells of TensorFlow and Keras, in a real kernel: in Python, and in functions that TensorFlow calls back.

TensorFlow calls such functions on threads of its own, while the main thread waits in C++, where no signal reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.jupyter.debugging_client import Debugging
from support.jupyter.live_kernel import Cell
from support.jupyter.prompting_kernel import PromptingKernel, names, plain
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share

pytestmark = pytest.mark.timeout(300)

SETUP = """\
%%hvd_run -np 2
import numpy as np, tensorflow as tf, keras
import hvdlab.tensorflow as hvd
hvd.init()
rank = hvd.rank()
x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
def model_of(kind=keras.Sequential, **options):
    model = kind([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", **options)
    return model
def summed(value):
    return float(hvd.allreduce(tf.constant(float(value)), op=hvd.Sum))
"""

CALLED_BACK = """\
%%hvd_run
def inside(t):
    u = t.numpy() + 1
    if rank == 1: {stop}
    z = u * 2
    return z
@tf.function
def step(t):
    return hvd.allreduce(tf.py_function(inside, [t], tf.float32), op=hvd.Sum)
print(float(step(tf.constant(2.0))))"""

MAPPED = """\
%%hvd_run
def inside(t):
    if rank == 1: breakpoint()
    return t
print([int(i) for i in tf.data.Dataset.range(3).map(lambda t: tf.py_function(inside, [t], tf.int64))])"""

CALLBACK = """\
%%hvd_run
class Looking(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 1: breakpoint()
        seen = batch
history = model_of().fit(x, y, batch_size=4, verbose=0, callbacks=[Looking()])
print(len(history.history["loss"]))"""

FAILING = """\
%%hvd_run
class Failing(keras.Sequential):
    def train_step(self, data):
        local = 42
        if rank == 1: raise ValueError("wrong")
        return super().train_step(data)
model_of(Failing{eagerly}).fit(x, y, verbose=0)"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptingKernel]:
    kernel = PromptingKernel(tmp_path_factory.mktemp("kernel"), prepare=["%load_ext hvdlab"])
    try:
        cell = kernel.run(SETUP, 240)
        assert cell.error is None, cell.error
        yield kernel
    finally:
        kernel.close()


@pytest.fixture
def kernel(started: PromptingKernel) -> Iterator[PromptingKernel]:
    yield started
    assert both_go_on(started)


def both_go_on(kernel: PromptingKernel) -> bool:
    cell = kernel.run("%%hvd_run\nprint(summed(rank + 1))")
    return cell.lines() == ["[0,1] 3.0"] or sorted(cell.lines()) == ["[0] 3.0", "[1] 3.0"]


def lines_of(cell: Cell) -> set[str]:
    """Return the lines that the ranks have written, without the ranks' numbers, which depend on how lines were
    merged."""
    return {line.partition("] ")[2] for line in plain(cell.text()).splitlines()}


def test_a_callback_of_keras(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(CALLBACK, "p batch, sorted(logs)", "n", "p seen", "c")
    assert names(prompts) == ["rank 1"] * 4
    assert cell.error is None, cell.error
    assert "(1, ['loss'])" in plain(cell.text())
    assert "----> 5         seen = batch" in plain(cell.text())
    assert cell.lines()[-1].endswith("] 1")


@pytest.mark.parametrize("eagerly", ["", ", run_eagerly=True"], ids=["traced", "eagerly"])
def test_a_step_of_fit_that_has_failed(kernel: PromptingKernel, eagerly: str) -> None:
    failed = kernel.run(FAILING.format(eagerly=eagerly), 120)
    assert failed.error is not None
    assert failed.error["ename"] == "ValueError"
    cell, prompts = kernel.dialogue("%hvd_debug", "p 'local is', local", "q")
    assert names(prompts) == ["rank 1"] * 2
    assert "('local is', 42)" in plain(cell.text())
    assert cell.error is None


def test_a_function_that_tensorflow_calls(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(CALLED_BACK.format(stop="breakpoint()"), "p u", "n", "p z * 100", "c")
    assert names(prompts) == ["rank 1"] * 4
    assert cell.error is None, cell.error
    assert "----> 6     return z" in plain(cell.text())
    assert "600.0" in plain(cell.text())
    assert "12.0" in lines_of(cell)
    asking = CALLED_BACK.format(stop="u = float(input('u? '))")
    cell, prompts = kernel.dialogue(asking, "5")
    assert prompts == ["[rank 1] u? "]
    assert "16.0" in lines_of(cell)


def test_quitting_there(kernel: PromptingKernel) -> None:
    cell, _ = kernel.dialogue(CALLED_BACK.format(stop="breakpoint()"), "q")
    assert cell.error is not None
    assert cell.error["ename"] == "BdbQuit"
    assert "the debugger was left with quit, which ends the cell" in cell.error["evalue"]


@pytest.mark.parametrize(
    "code",
    [CALLED_BACK.format(stop="breakpoint()"), CALLED_BACK.format(stop="input('x')"), MAPPED],
    ids=["debugger", "input", "dataset"],
)
def test_an_interrupt_there_ends_the_cell(kernel: PromptingKernel, code: str) -> None:
    cell, _ = kernel.dialogue(code, kernel.interrupt)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "interrupted" in cell.error["evalue"]


@pytest.fixture
def debugging(kernel: PromptingKernel) -> Iterator[Debugging]:
    pytest.importorskip("debugpy")
    debugging = Debugging(kernel)
    debugging.switch_on()
    yield debugging
    debugging.switch_off()


def test_the_notebooks_debugger(kernel: PromptingKernel, debugging: Debugging) -> None:
    code = CALLBACK.replace("if rank == 1 and batch == 1: breakpoint()", "pass")
    debugging.set_breakpoints(code, 5)
    cell = kernel.send(code)
    for batch in range(2):
        threads = debugging.stopped(2)
        frame = next(one for one in debugging.frames(threads[1]) if "on_train_batch_end" in one["name"])
        assert debugging.variables(frame["id"])["batch"] == str(batch)
        debugging.ask("continue", threadId=threads[0])
    kernel.finish(cell)
    assert cell.error is None, cell.error


@pytest.mark.parametrize("leave", ["continue", "interrupt"])
def test_the_notebooks_debugger_in_a_function_that_tensorflow_calls(
    kernel: PromptingKernel, debugging: Debugging, leave: str
) -> None:
    code = CALLED_BACK.format(stop="pass")
    debugging.set_breakpoints(code, 5)
    cell = kernel.send(code)
    threads = debugging.stopped(2)
    frame = next(one for one in debugging.frames(threads[0]) if "inside" in one["name"])
    assert "3.0" in debugging.variables(frame["id"])["u"]
    if leave == "continue":
        debugging.ask("continue", threadId=threads[0])
        kernel.finish(cell)
        assert cell.error is None, cell.error
        assert "12.0" in lines_of(cell)
    else:
        kernel.interrupt()
        kernel.finish(cell)
        assert cell.error is not None
        assert cell.error["evalue"] == "ranks 0,1 were interrupted"
        assert debugging.ask("debugInfo")["body"]["stoppedThreads"] == []
