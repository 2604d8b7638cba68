"""Where cells run."""

from __future__ import annotations

import pytest

from hvdlab.kernel_ext.kernel.cell_routing import CellRouter, Help, Route, asks_ranks, python_of, route
from support.threads import in_threads

ON_RANKS = [
    "x = 1",
    "\n\nx = 1\n",
    "# a comment\nx = 1",
    "%%time\nx = 1",
    "%%bash\nls",
    "%matplotlib inline",
    "%load_ext autoreload\n%autoreload 2",
    "!ls",
    "%env A=1",
    "exit_code = 3",
    "text = '''\n%hvd_pool stop\n'''",
]
HERE = [
    "",
    "  \n",
    "# only a comment",
    "%hvd_pool status",
    "%hvd_pool resize 4\n%hvd_where",
    "%load_ext hvdlab",
    "%%hvd_run -np 2\nx = 1",
    "%%hvd_rank 0\nx = 1",
    "%%writefile train.py\nx = 1",
    "%%html\n<b>hello</b>",
    "%pip install numpy",
    "!pip install numpy",
    "!python -m pip install numpy",
    "%history -n 3",
    "exit",
    "quit()",
    "%hvd_pool?",
    "%%local with options\nx",
]


@pytest.mark.parametrize("cell", ON_RANKS)
def test_runs_on_the_ranks_as_it_is(cell: str) -> None:
    assert route(cell) == Route(ranks=cell)
    assert asks_ranks(cell)


@pytest.mark.parametrize("cell", HERE)
def test_runs_here_as_it_is(cell: str) -> None:
    assert route(cell) == Route(here=cell)
    assert not asks_ranks(cell)


def test_a_local_cell_runs_here_with_its_own_line_numbers() -> None:
    assert route("\n%%local\nx = 1\n") == Route(here="\n\nx = 1\n")


def test_control_lines_at_the_top_run_here_and_the_rest_keeps_its_line_numbers() -> None:
    where = route("# eight\n%hvd_pool resize 8\n\nimport os\nos.getpid()")
    assert where == Route(here="# eight\n%hvd_pool resize 8\n\n", ranks="\n\n\nimport os\nos.getpid()")


@pytest.mark.parametrize(
    ("cell", "name", "detail"),
    [("x?", "x", 0), ("x.y??", "x.y", 1), ("?x", "x", 0), ("??x.y", "x.y", 1), ("\n x ?\n", "x", 0)],
)
def test_help_is_asked_of_a_rank(cell: str, name: str, detail: int) -> None:
    assert route(cell) == Route(help=Help(name, detail))
    assert asks_ranks(cell)


@pytest.mark.parametrize("cell", ["%timeit?", "os.*path*?", "%%time??"])
def test_for_other_looks_one_rank_is_enough(cell: str) -> None:
    assert route(cell) == Route(ranks=cell, first_only=True)
    assert "--ranks 0" in python_of(route(cell))[0]


def test_only_the_cell_that_the_kernel_was_asked_to_run_is_sent_to_ranks() -> None:
    router = CellRouter()
    lines = ["x = 1\n", "y = 2\n"]
    assert router(lines) == lines
    router.cell, router.options = "x = 1\ny = 2", "-np 3"
    assert router(["z = 3\n"]) == ["z = 3\n"]
    assert router(lines) == ["get_ipython().run_cell_magic('hvd_run', '-np 3', 'x = 1\\ny = 2\\n')\n"]


def test_cell_of_a_subshell_leaves_routing_of_main_cell_alone() -> None:
    router = CellRouter()
    router.cell, router.options = "x = 1", "-np 3"
    routed: list[list[str]] = []

    def run_subshell() -> None:
        router.cell = "y = 2"
        routed.append(router(["y = 2\n"]))
        router.cell = None

    in_threads([run_subshell])
    assert routed == [["get_ipython().run_cell_magic('hvd_run', '', 'y = 2\\n')\n"]]
    assert router(["x = 1\n"]) == ["get_ipython().run_cell_magic('hvd_run', '-np 3', 'x = 1\\n')\n"]
