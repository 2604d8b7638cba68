"""Ranks that ask, in a real kernel whose client answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jupyter.live_kernel import Cell
from support.jupyter.prompting_kernel import Answer, PromptingKernel, names, plain
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share

# The import of a debugger by one rank is not to be a stall of the others.
IMPORTS = (
    "%%hvd_run -np 3\nimport pdb\nfrom IPython.core.debugger import Pdb\nPdb()\nimport numpy, hvdlab.numpy"
)
SETUP = (
    "%%hvd_run -np 3\nimport os, signal, sys, time\nimport numpy as np\n"
    "import hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\ncontext.init()\nrank = int(os.environ['RANK'])\nx = rank * 10\n"
    "def meet(): return float(hvd.allreduce(np.ones(3), name='loss')[0])\nmeet()"
)

SHUTDOWN = 10.0
"""Seconds that a rank may come later to a collective than the others: more than a slow machine keeps one from running."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptingKernel]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
        environment.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", f"{SHUTDOWN:g}")
        kernel = PromptingKernel(
            tmp_path_factory.mktemp("kernel"), prepare=["%load_ext hvdlab", IMPORTS, SETUP]
        )
    yield kernel
    kernel.close()


def test_one_rank_asks_for_a_line_and_a_password(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\nif rank == 1:\n    import getpass\n    print('before')\n"
        "    name = input('name? ')\n    word = getpass.getpass('word: ')\n    print(name, len(word))",
        "Ada",
        "@2",
    )
    assert prompts == ["[rank 1] name? ", "[rank 1] word: "]
    assert cell.lines() == ["[1] before", "[1] Ada 2"]
    assert cell.error is None


def test_what_other_ranks_write_is_seen_while_one_asks(kernel: PromptingKernel) -> None:
    seen: list[str] = []

    def answer_when_seen() -> None:
        (cell,) = [one for one in kernel.cells.values() if not one.ended]
        (kernel.directory / "asked").touch()
        kernel.until(lambda: "1 wrote 199" in cell.text() and "shown by 2" in str(cell.messages))
        seen.extend(cell.lines())
        kernel.client.input("Ada")

    cell, prompts = kernel.dialogue(
        "%%hvd_run\nif rank == 0:\n    print('asks')\n    print('hello', input('name? '))\nelse:\n"
        "    while not os.path.exists('asked'): time.sleep(0.01)\n"
        "    if rank == 2: display({'text/plain': 'shown by 2'}, raw=True)\n"
        "    else:\n        for i in range(200): print(rank, 'wrote', i)",
        answer_when_seen,
    )
    assert prompts == ["[rank 0] name? "]
    written = [f"[1] 1 wrote {i}" for i in range(200)]
    assert seen == ["[0] asks", *written]
    assert cell.lines() == [*seen, "[0] hello Ada"]
    assert cell.error is None


def test_several_ranks_are_queued_and_the_user_chooses(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\nprint('got', input('rate? '))", "@2", "0.2", "@?", "@7", "all: 0.1"
    )
    assert names(prompts) == ["rank 0", "rank 2", "rank 0", "rank 0", "rank 0"]
    assert prompts[0] == "[rank 0] (others wait, @? tells) rate? "
    assert sorted(line for line in cell.lines() if " got " in line) == ["[0,1] got 0.1", "[2] got 0.2"]
    assert "  rank 1: rate?" in cell.lines()
    assert "rank 7 is not at a prompt; `@?` tells who is" in cell.lines()
    assert cell.lines("stderr") == []


def test_the_debugger_stops_in_a_rank_with_the_cells_own_lines(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\n\ndef f(a):\n    b = a + 1\n    if rank == 2: breakpoint()\n    c = b * 2\n    return c\nprint(f(x))",
        "p a, b",
        "next",
        "p c",
        "continue",
    )
    assert names(prompts) == ["rank 2"] * 4
    text = plain(cell.text())
    assert "(20, 21)" in text
    assert "<cell [5]>(6)f()" in text or "(6)f()" in text
    assert "----> 6     c = b * 2" in text
    assert "42" in text
    assert cell.error is None


def thinks(kernel: PromptingKernel, seconds: float, answer: str) -> Answer:
    """The user looks at it for a while."""

    def think() -> None:
        time.sleep(seconds)  # no event must come in this time
        kernel.client.input(answer)

    return think


def test_ranks_in_a_collective_wait_for_one_at_a_prompt_without_a_stall(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\nif rank == 2: breakpoint()\nmeet()", thinks(kernel, SHUTDOWN + 1, "p rank"), "continue"
    )
    assert names(prompts) == ["rank 2", "rank 2"]
    assert cell.error is None, cell.error
    assert "waited" not in cell.text("stderr")
    assert "rank 2 is at a prompt" in str(cell.of("display_data"))


def test_quitting_the_debugger_leaves_nobody_waiting(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue("%%hvd_run\nimport pdb\nif rank == 1: pdb.set_trace()\nmeet()", "q")
    assert prompts == ["[rank 1] (Pdb) "]
    assert cell.error is not None
    assert "BdbQuit" in plain(cell.error)
    assert kernel.run("%%hvd_run\nmeet()").error is None


def test_an_interrupt_at_a_prompt_ends_the_cell_everywhere(kernel: PromptingKernel) -> None:
    cell, _ = kernel.dialogue("%%hvd_run\nif rank == 1: breakpoint()\nmeet()", kernel.interrupt)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.run("%%hvd_run\nmeet()").error is None


def test_all_ranks_step_together_and_equal_output_is_shown_once(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\ndef f():\n    breakpoint()\n    y = meet()\n    return y\nf()",
        "all: next",  # a collective that all carry out together
        "all: p y, 7 * 6",
        "0,2: p rank",
        "all: continue",
    )
    assert names(prompts) == ["rank 0"] * 4
    assert "[0-2] (3.0, 42)" in plain(cell.text()) or "[0-2] (1.0, 42)" in plain(cell.text())
    assert {"[0] 0", "[2] 2"} <= set(plain(cell.text()).splitlines())
    assert "[1] 1" not in plain(cell.text()).splitlines()
    assert cell.error is None


def test_a_rank_that_dies_at_a_prompt_does_not_keep_it_open(kernel: PromptingKernel) -> None:
    pid = int(kernel.run("%%hvd_rank 2\nprint(os.getpid())").text())
    cell, _ = kernel.dialogue(
        "%%hvd_run\nif rank == 2: input('soon gone')", lambda: os.kill(pid, signal.SIGKILL)
    )
    assert cell.error is not None
    assert "rank 2 died" in plain(cell.error)
    assert kernel.run("%hvd_pool repair").error is None
    setup = (
        "%%hvd_rank 2\nimport os\nimport numpy as np\nimport hvdlab.numpy as hvd\n"
        "from hvdlab.collectives import context\ncontext.init()\nrank, x = 2, 20\n"
    )
    again = kernel.run(setup + "def meet(): return float(hvd.allreduce(np.ones(3), name='loss')[0])")
    assert again.error is None, again.error


def test_what_failed_is_looked_at_afterwards_in_the_rank_that_failed_first(kernel: PromptingKernel) -> None:
    failed = kernel.run("%%hvd_run\ndef g(n):\n    return 1 / n\nif rank == 1: g(0)\nmeet()")
    assert failed.error is not None
    cell, prompts = kernel.dialogue("%hvd_debug", "p n", "up", "q")
    assert len(prompts) == 3
    assert prompts[0].startswith("[rank 1]")
    assert "return 1 / n" in plain(cell.text())
    assert cell.error is None
    assert kernel.run("%%hvd_run\nmeet()").error is None
    late = kernel.run("%hvd_debug 1")
    assert "nothing to debug: the last cell of rank 1 did not fail" in late.text("stderr")
    assert late.text() == ""


def test_conditional_breakpoints_stop_where_they_are_to(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\nfrom hvdlab.collectives.basics import breakpoint as stop\n"
        "def f():\n    for i in range(4):\n        stop(ranks=[2], when=lambda: i == 3)\n        done = i\n    return done\nf()",
        "p i, rank",
        "c",
    )
    assert names(prompts) == ["rank 2"] * 2
    assert "(3, 2)" in plain(cell.text())


def test_a_cell_in_the_background_can_not_ask(kernel: PromptingKernel) -> None:
    kernel.run("%%hvd_run --background --out later\ninput('x')")
    cell = kernel.run("later.wait()")
    assert "input() can't ask from a cell in the background" in plain(cell.error)


def test_where_nobody_can_be_asked_the_error_says_what_to_do(kernel: PromptingKernel) -> None:
    message = kernel.client.execute("%%hvd_run\nif rank == 0: breakpoint()\nx = 1", allow_stdin=False)
    cell = kernel.cells[message] = Cell(message, time.monotonic())
    kernel.finish(cell)
    assert "the debugger can't ask: what runs this notebook takes no input" in plain(cell.error)


def test_where_tells_who_is_at_a_prompt(kernel: PromptingKernel, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    kernel.run(
        "import pathlib, threading\npool = get_ipython()._hvdlab_extension.session.pool\n"
        "def watch():\n    while 'at a prompt' not in (text := repr(pool.where())): pass\n"
        f"    pathlib.Path({str(seen)!r}).write_text(text)\n"
        "threading.Thread(target=watch).start()"
    )

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not seen.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        kernel.client.input("ok")

    kernel.dialogue("%%hvd_run --ranks 1\ninput('x')", wait)
    assert "rank 1: at a prompt" in seen.read_text()
