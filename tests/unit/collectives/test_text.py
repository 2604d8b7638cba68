"""Control characters stand as their escapes."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.text import visible, visible_coloured, visible_lines


def test_what_is_shown_as_it_is() -> None:
    for text in ("", "layer1.weight", "gradient ∂x → 日本 é", "a b\\n"):
        assert visible(text) == text


def test_what_is_not() -> None:
    assert visible("a\x1b[2J\r\n\t\x9b\u202e\ud800") == "a\\x1b[2J\\r\\n\\t\\x9b\\u202e\\ud800"
    assert visible_lines("a\nb\x07") == "a\nb\\x07"


def test_long_text_is_cut_also_when_escapes_make_it_long() -> None:
    assert visible("x" * 10, 10) == "x" * 10
    assert visible("x" * 11, 10) == "x" * 9 + "…"
    assert len(visible("\x1b" * 1000, 10)) == 10


@given(st.text(st.characters(categories=["Cc", "Cs", "Zl", "Zp", "L", "Zs"])), st.integers(1, 30))
def test_nothing_is_left_that_a_terminal_obeys(text: str, most: int) -> None:
    shown = visible(text, most)
    assert len(shown) <= most
    assert not {unicodedata.category(one) for one in shown} & {"Cc", "Cs", "Zl", "Zp"}
    shown.encode()


def test_colours_and_tabs_of_a_traceback_stay_and_other_orders_are_shown() -> None:
    line = "\x1b[1;31mValueError\x1b[0m:\tbad\x1b[2J\x1b]0;t\x07\x9b31m"
    assert visible_coloured(line) == "\x1b[1;31mValueError\x1b[0m:\tbad\\x1b[2J\\x1b]0;t\\x07\\x9b31m"
    assert visible_coloured("two\nlines") == "two\nlines"
