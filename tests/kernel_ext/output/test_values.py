"""Values of many ranks stay readable: equal ones once, long ones cut."""

from __future__ import annotations

from hvdlab.kernel_ext.output.values import FEWEST_LINES, MOST_LINES, text_of


def value(text: str) -> dict[str, str]:
    return {"text/plain": text}


def test_short_values_are_whole() -> None:
    assert text_of([((0, 1), value("3")), ((2,), value("a\nb"))]) == "[0,1] 3\n[2]   a\n      b"


def test_a_long_value_is_cut_and_says_what_has_it_whole() -> None:
    lines = text_of([((1, 2), value("\n".join(f"{n}," for n in range(335))))], name="losses").splitlines()
    assert len(lines) == MOST_LINES
    assert lines[:2] == ["[1,2] 0,", "      1,"]
    assert lines[-1] == "      … 324 more lines; `losses[1]` has all"


def test_one_line_too_many_is_cut_to_the_same_height() -> None:
    assert len(text_of([((0,), value("x\n" * MOST_LINES))]).splitlines()) == MOST_LINES
    assert "…" not in text_of([((0,), value("\n".join("x" * MOST_LINES)))])


def test_many_ranks_get_fewer_lines_each() -> None:
    groups = [((rank,), value(f"{rank}\n" * 50)) for rank in range(64)]
    assert len(text_of(groups).splitlines()) == 64 * FEWEST_LINES


def test_a_very_long_line_is_cut() -> None:
    text = text_of([((3,), value("x" * 100_000))])
    assert len(text) < 1100
    assert text.endswith("`_[3]` has all")
