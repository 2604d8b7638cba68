"""Displays, figures, tables and progress bars of a rank."""

from __future__ import annotations

import base64
import json
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hvdlab.kernel_ext.rank.shell_setup import LONGEST_TEXT
from hvdlab.kernel_ext.wire.codec import wire_value
from support.ranks.alone import run_in_new_rank

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Rank


def test_display_carries_the_mime_bundle(rank: Rank) -> None:
    ran = rank.run("from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'), metadata={'a': 1})")
    (shown,) = ran.displays
    assert shown.data["text/html"] == "<b>x</b>"
    assert shown.metadata == {"a": 1}
    assert not shown.result


def test_displays_are_updated_by_their_id(rank: Rank) -> None:
    ran = rank.run("from IPython.display import display\nh = display(1, display_id='it')\nh.update(2)\nNone")
    first, second = ran.displays
    assert (first.display_id, first.update) == ("it", False)
    assert (second.display_id, second.update) == ("it", True)
    assert second.data["text/plain"] == "2"


def test_every_expression_is_shown_if_asked_for(rank: Rank) -> None:
    rank.shell.ast_node_interactivity = "all"
    try:
        ran = rank.run("1\n2")
    finally:
        rank.shell.ast_node_interactivity = "last_expr"
    assert [d.data["text/plain"] for d in ran.displays] == ["1", "2"]
    assert ran.done.value_repr == "2"


def test_pandas_tables_are_html(rank: Rank) -> None:
    ran = rank.run("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
    assert "<table" in ran.displays[0].data["text/html"]
    assert "a" in ran.displays[0].data["text/plain"]


def test_figures_are_shown_at_the_end_of_their_cell() -> None:
    """In a process of its own: matplotlib keeps the first backend."""
    ran = run_in_new_rank(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nprint('before')",
        "import matplotlib.pyplot as plt\nplt.plot([3, 4]);\n1 / 0",
        "%matplotlib inline\nplt.plot([3, 4]);",
        "plt.gcf().canvas.draw = lambda: 1 / 0\nplt.plot([1]);",
    )
    for cell in ran[:3]:
        (png,) = [d["data"]["image/png"] for d in cell["displays"] if "image/png" in d["data"]]
        assert base64.b64decode(png).startswith(b"\x89PNG")
    assert ran[1]["error"] == "ZeroDivisionError"
    assert "image/png" in ran[0]["displays"][-1]["data"]


def test_figures_survive_a_warm_import() -> None:
    """pyplot was imported before the rank had a shell, as in a process that ranks are forked from."""
    ran = run_in_new_rank(
        "plt = __import__('matplotlib.pyplot').pyplot\nplt.plot([1, 2]);", preload="import matplotlib.pyplot"
    )
    assert ran[0]["displays"][-1]["data"].get("image/png")


@pytest.mark.parametrize("module", ["tqdm.auto", "tqdm.notebook", "tqdm.autonotebook", "tqdm"])
@pytest.mark.parametrize("preload", ["", "import ipykernel.zmqshell, tqdm.auto, tqdm.notebook"])
def test_progress_bars_are_text(module: str, preload: str) -> None:
    source = f"import ipykernel.zmqshell\nfrom {module} import tqdm, trange\nfor _ in tqdm(range(3), desc='epoch'): pass"
    (ran,) = run_in_new_rank(source, preload=preload)
    assert ran["error"] is None
    assert "epoch: 100%" in ran["stderr"]
    assert "\r" in ran["stderr"]
    assert not ran["displays"]


def test_a_formatter_that_fails_does_not_fail_the_cell(rank: Rank) -> None:
    ran = rank.run(
        "class Bad:\n    def _repr_html_(self): raise RuntimeError('no html')\n    def __repr__(self): return 'plain'\nBad()"
    )
    assert ran.done.error is None
    assert ran.done.value_repr == "plain"
    assert "no html" in ran.text("stderr")


def test_a_broken_repr_does_not_fail_the_cell(rank: Rank) -> None:
    ran = rank.run("class Bad:\n    def __repr__(self): raise RuntimeError('no repr')\nBad()")
    assert ran.done.error is None
    assert "no repr" in ran.done.value_repr
    assert ran.done.has_value


def test_huge_reprs_are_bounded(rank: Rank) -> None:
    ran = rank.run("class Big:\n    def __repr__(self): return 'x' * 20_000_000\nBig()", want_value=False)
    assert len(ran.done.value_repr) < 5000
    assert len(ran.displays[0].data["text/plain"]) < LONGEST_TEXT + 100


@pytest.mark.parametrize(
    "value",
    [
        1 << 70,
        -(1 << 70),
        float("nan"),
        b"\x00\xff",
        {1: {2: (3,)}},
        {"s"},
        "\udc80",
        object,
        [None, True],
        10**400,
    ],
)
def test_any_mime_data_can_be_sent(value: Any) -> None:
    msgspec.msgpack.encode(wire_value(value))
    json.dumps(wire_value(value))


def test_numpy_scalars_are_numbers_as_in_a_kernel() -> None:
    import numpy as np

    sent = wire_value({"a": np.float32(1.5), "b": np.int32(3), "c": np.array([1])})
    assert sent == {"a": 1.5, "b": 3, "c": "[1]"}
    assert {type(sent[key]) for key in "ab"} == {float, int}
    msgspec.msgpack.encode(sent)
    assert wire_value(Fraction(1, 4)) == 0.25


# -- calls that need a person at the rank -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["input('name? ')", "import getpass\ngetpass.getpass()"])
def test_asking_where_nobody_answers_is_refused_with_a_sentence(rank: Rank, source: str) -> None:
    error = rank.run(source).error
    assert error.ename == "StdinNotImplementedError"
    assert "can't ask" in error.evalue
    assert "%hvd_push" in error.evalue


def test_reading_stdin_ends_at_once(rank: Rank) -> None:
    assert rank.run("import sys\nsys.stdin.read()").done.value_repr == "''"


def test_breakpoint_where_nobody_answers_is_refused_with_a_sentence(rank: Rank) -> None:
    error = rank.run("def f():\n    breakpoint()\n    x = 1\nf()", label="[7]").error
    assert "the debugger can't ask" in error.evalue
    assert "line 4" in "\n".join(error.traceback)
    assert "bdb" not in "\n".join(error.traceback)


def test_pdb_does_not_hang() -> None:
    """In a process of its own: pytest has a pdb of its own."""
    ran = run_in_new_rank("import pdb\npdb.set_trace()\nx = 1", "'alive'")
    assert ran[0]["error"]
    assert ran[1]["value"] == "'alive'"


def test_what_no_browser_could_show_is_replaced_by_a_line(rank: Rank) -> None:
    ran = rank.run("from IPython.display import display, HTML\ndisplay(HTML('x' * 17_000_000))")
    (shown,) = ran.displays
    assert "text/html" not in shown.data
    assert "(text/html of 17,000,000 bytes is too large to be shown" in shown.data["text/plain"]


# -- texts that are more than texts -----------------------------------------------------------------------------------

RICH_TEXT = """
from IPython.display import display, publish_display_data
class Text(str):
    __slots__ = ()
"""


def test_representations_may_be_of_a_subclass_of_str(rank: Rank) -> None:
    ran = rank.run(
        RICH_TEXT + "import numpy\n"
        "class Shown:\n    def _repr_html_(self): return Text('<b>grün</b>')\n"
        "display(Shown(), metadata={Text('a'): Text('b')})\n"
        "publish_display_data({numpy.str_('text/plain'): numpy.str_('x'), 'a/b': {Text('k'): [Text('v')]}})\n"
        "print(Text('printed'))\n"
        "Shown()"
    )
    assert ran.done.error is None
    first, second, value = ran.displays
    assert first.data["text/html"] == value.data["text/html"] == "<b>grün</b>"
    assert first.metadata == {"a": "b"}
    assert second.data == {"text/plain": "x", "a/b": {"k": ["v"]}}
    assert ran.text() == "printed\n"


def test_what_cannot_be_sent_is_told_and_does_not_fail_the_cell(rank: Rank) -> None:
    ran = rank.run(
        RICH_TEXT + "class Bad:\n    def __str__(self): raise OSError('gone')\n"
        "deep = []\nfor _ in range(5000): deep = [deep]\n"
        "publish_display_data({'text/plain': 'fine', 'a/b': Bad(), 'c/d': deep})\n"
        "print('goes on')"
    )
    assert ran.done.error is None
    (shown,) = ran.displays
    assert set(shown.data) == {"text/plain"}
    text = shown.data["text/plain"]
    assert text.startswith("fine\n(a/b can't be sent: OSError: gone)\n(c/d can't be sent: RecursionError")
    assert ran.text() == "goes on\n"
