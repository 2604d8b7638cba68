"""Ranks that ask, in a real kernel whose client answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prompting_kernel import PromptingKernel, names, plain


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Ranks come and go in the kernel that all these tests share; test_real_notebook.py sees them end with it."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptingKernel]:
    kernel = PromptingKernel(tmp_path_factory.mktemp("kernel"))
    kernel.run("%load_ext hvdlab")
    cell = kernel.run("%%hvd_run -np 3\nimport os, sys, time\nrank = int(os.environ['RANK'])\nx = rank * 10")
    assert cell.error is None, cell.error
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


def test_several_ranks_are_queued_and_the_user_chooses(kernel: PromptingKernel) -> None:
    cell, prompts = kernel.dialogue(
        "%%hvd_run\nprint('got', input('rate? '))", "@2", "0.2", "@?", "@7", "all: 0.1"
    )
    assert names(prompts) == ["rank 0", "rank 2", "rank 0", "rank 0", "rank 0"]
    assert prompts[0] == "[rank 0] (ranks 1,2 wait, @? tells) rate? "
    assert sorted(cell.lines()) == ["[0,1] got 0.1", "[2] got 0.2"]
    assert "  rank 1: rate?" in cell.lines("stderr")
    assert "rank 7 is not at a prompt; `@?` tells who is" in cell.lines("stderr")


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
