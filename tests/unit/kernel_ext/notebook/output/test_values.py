"""Values of many ranks stay readable: equal ones once, long ones cut."""

from __future__ import annotations

import base64
import re

from hvdlab.kernel_ext.notebook.cells.results import (
    FEWEST_LINES,
    MOST_LINES,
    ValueNotSent,
    html_of,
    text_of,
)


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


def test_a_cut_value_that_was_not_sent_says_why_and_not_that_the_results_have_it() -> None:
    text = text_of(
        [((0, 1), value("x" * 100_000))], unsent={0: ValueNotSent("too large"), 1: ValueNotSent("no")}
    )
    assert text.endswith("… cut; the value was not sent: too large"), text
    text = text_of([((0, 1), value("x" * 100_000))], unsent={0: ValueNotSent("too large")})
    assert text.endswith("… cut; `_[1]` has all"), "another rank's equal value came"


def test_a_large_value_that_shows_its_corners_only_says_that_it_was_not_sent() -> None:
    """As tensors and data frames: their texts are short however large they are."""
    large = {0: ValueNotSent("larger than 1 byte", large=True)}
    assert text_of([((0,), value("tensor([0, ..., 9])"))], unsent=large) == (
        "[0] tensor([0, ..., 9])\n    (the value was not sent: larger than 1 byte)"
    )
    html = html_of([((0,), {"text/html": "<table></table>"})], unsent=large)
    assert html is not None
    assert "the value was not sent: larger than 1 byte" in html


def test_a_short_value_that_can_not_be_sent_is_shown_alone() -> None:
    assert text_of([((0,), value("<lock>"))], unsent={0: ValueNotSent("it can't be pickled")}) == "[0] <lock>"


def test_scripts_of_a_picture_do_not_run() -> None:
    """Frontends show SVG as a picture, in which no script runs. Within a page it would."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(2)</script></svg>'
    for content in (svg, svg.encode()):
        html = html_of([((0,), {"image/svg+xml": content})])
        assert html is not None
        assert re.findall(r"<(\w+)", html) == ["div", "div", "img"]
        found = re.search('src="data:image/svg.xml;base64,([^"]+)"', html)
        assert found is not None
        assert base64.b64decode(found[1]).decode() == svg


def test_what_is_no_base64_does_not_leave_its_attribute() -> None:
    for kind in ("image/png", "image/jpeg"):
        html = html_of([((0,), {kind: 'x"><b onclick=1>'})])
        assert html is not None
        assert re.findall(r"<(\w+)", html) == ["div", "div", "img"]
    html = html_of([((0,), {"image/png": b"\x89PNG"}), ((1,), {"image/png": "aGk=\n"})])
    assert html is not None
    assert '"data:image/png;base64,iVBORw=="' in html
    assert '"data:image/png;base64,aGk="' in html
