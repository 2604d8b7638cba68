"""Too much output shows its beginning and its end, and the place of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.output.limit import LEAST_SHARE, LimitedSink, shown_limit
from hvdlab.kernel_ext.notebook.output.merge import lasting
from hvdlab.kernel_ext.notebook.output.transcript import Transcript
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Clear, Display, Stream

LINE = "x" * 99 + "\n"
BLOCK = LINE * 100


class Shown(OutputSink):
    """Text that reached the screen."""

    def __init__(self) -> None:
        self.chunks: dict[int, list[Chunk]] = {}
        self.notes: list[str] = []
        self.ended: list[int] = []

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self.chunks.setdefault(rank, []).extend(chunks)

    def done(self, rank: int, done: CellDone | None) -> None:
        self.ended.append(rank)

    def note(self, text: str, *, warning: bool = False) -> None:
        self.notes.append(text)

    def tick(self, now: float) -> float | None:
        return None

    def backlog(self) -> int:
        return 0

    def shorten(self) -> None:
        pass

    def text(self, rank: int = 0) -> str:
        return "".join(c.text for c in self.chunks.get(rank, ()) if isinstance(c, Stream))


@pytest.fixture
def shown() -> Shown:
    return Shown()


def limited(shown: Shown, ranks: int = 1, limit: int = LEAST_SHARE) -> LimitedSink:
    return LimitedSink(shown, range(ranks), limit)


def write(sink: LimitedSink, text: str, rank: int = 0, name: str = "stdout") -> None:
    sink.output(rank, (Stream(name, text),))


def test_what_is_within_the_share_passes_as_it_is(shown: Shown) -> None:
    sink = limited(shown)
    sink.output(0, (Stream("stdout", "a"), Display({"text/plain": "b"}, {}), Stream("stderr", "c\n")))
    sink.done(0, None)
    assert shown.chunks[0] == [
        Stream("stdout", "a"),
        Display({"text/plain": "b"}, {}),
        Stream("stderr", "c\n"),
    ]
    assert shown.notes == []


def test_the_beginning_and_the_end_are_shown(shown: Shown, tmp_path: Path) -> None:
    sink = limited(shown)
    sink.set_transcript(Transcript("c", "[7]", (0,), tmp_path))
    for _ in range(20):
        write(sink, BLOCK)
    write(sink, "the end\n")
    sink.done(0, None)
    text = shown.text()
    lines = text.splitlines()
    assert lines[0] == LINE[:-1]
    assert lines[-1] == "the end"
    assert LEAST_SHARE - 100 < text.index("…") <= LEAST_SHARE
    assert "134.5 kB more; the last lines:" in text
    assert len(text) < LEAST_SHARE + 5000
    assert len(shown.notes) == 1
    assert "`%hvd_output 7 --to FILE`" in shown.notes[0]


def test_each_rank_has_its_share(shown: Shown) -> None:
    sink = limited(shown, ranks=4, limit=8 * LEAST_SHARE)
    for _ in range(12):
        write(sink, BLOCK, rank=0)
        write(sink, BLOCK, rank=1)
    assert shown.text(0) == shown.text(1) == BLOCK * 12
    write(sink, BLOCK * 2, rank=2)
    for _ in range(20):
        write(sink, BLOCK, rank=0)
    assert 2 * LEAST_SHARE - 100 < len(shown.text(0)) <= 2 * LEAST_SHARE
    assert shown.text(2) == BLOCK * 2


def test_the_last_line_is_shown_in_place_now_and_then(shown: Shown) -> None:
    sink = limited(shown, ranks=2, limit=0)
    for _ in range(10):
        write(sink, BLOCK)
    before = len(shown.text())
    assert sink.tick(10.0) == pytest.approx(10.5) or sink.tick(10.1) is None
    write(sink, "step 1 loss 0.5\n")
    sink.tick(10.2)
    assert "step 1" not in shown.text()
    sink.tick(10.6)
    live = shown.text()[before:]
    assert live.count("\r") == 2
    assert live.split("\r")[-1].endswith("now: step 1 loss 0.5")
    assert sink.tick(11.2) is None


def test_a_line_without_end_is_cut_too(shown: Shown) -> None:
    sink = limited(shown)
    for _ in range(10):
        write(sink, "y" * 50_000)
    sink.done(0, None)
    assert len(shown.text()) < LEAST_SHARE + 10_000
    assert "… 434.5 kB more" in shown.text()


def test_an_unfinished_line_is_not_overwritten_by_what_stands_for_the_rest(shown: Shown) -> None:
    sink = limited(shown, ranks=2, limit=0)
    write(sink, "waiting ...")
    for _ in range(10):
        write(sink, BLOCK, name="stderr")
    sink.tick(10.0)
    texts = [c.text for c in shown.chunks[0] if isinstance(c, Stream) and c.name == "stdout"]
    assert texts[1].startswith("\n\r…")


def test_bars_count_once(shown: Shown) -> None:
    sink = limited(shown)
    for i in range(5000):
        write(sink, f"\r{i} " + "█" * 50)
    assert "4999" in shown.text()
    assert shown.notes == []
    assert lasting("a\rb\nc\r") == 2
    assert lasting("abc\rd\nefg") == 5


def test_nested_bars_count_once_and_are_cut_to_what_they_show(shown: Shown) -> None:
    sink = limited(shown)
    bar = "█" * 50
    for i in range(5000):
        write(sink, f"\repoch 1\n\rbatch {i} {bar}\x1b[A")
    assert "4999" in shown.text()
    assert shown.notes == []
    assert lasting(f"\n\rbatch 1 {bar}\x1b[A\n\n\rbatch 2 {bar}\x1b[2A\rends\n") == len("ends\n")
    write(sink, LINE * 1000)
    for i in range(3):
        write(sink, f"\repoch 2\n\rbatch {i} {bar}\x1b[A")
    sink.tick(10.0)
    assert "more; now: batch 2 █" in shown.text()
    sink.done(0, None)
    assert shown.text().endswith(f"\nepoch 2\nbatch 2 {bar}\n")


def test_plots_that_are_redrawn_are_shown_for_ever_but_not_more_and_more_of_them(shown: Shown) -> None:
    picture = Display({"image/png": "p" * LEAST_SHARE}, {})
    sink = limited(shown, ranks=2)
    for _ in range(30):
        sink.output(0, (Clear(True), picture))
        sink.output(0, (Display({"image/png": "u" * LEAST_SHARE}, {}, "id", update=True),))
    assert len(shown.chunks[0]) == 90
    for _ in range(30):
        sink.output(1, (picture,))
    sink.done(1, None)
    assert sum(isinstance(chunk, Display) for chunk in shown.chunks[1]) < 12
    assert "displays" in shown.text(1)


def test_clearing_gives_a_single_rank_its_share_again(shown: Shown) -> None:
    sink = limited(shown)
    for _ in range(10):
        write(sink, BLOCK)
    sink.output(0, (Clear(True),))
    write(sink, "again\n")
    sink.done(0, None)
    assert shown.text().endswith("again\n")


def test_text_behind_a_clear_in_one_batch_is_shown(shown: Shown) -> None:
    sink = limited(shown)
    for _ in range(10):
        write(sink, BLOCK)
    sink.output(0, (Clear(True), Stream("stdout", "again\n")))
    assert shown.text().endswith("again\n")
    sink.done(0, None)
    assert shown.text().count("again\n") == 1


def test_the_user_chooses_how_much() -> None:
    assert shown_limit({}) == 4 << 20
    assert shown_limit({"HVDLAB_OUTPUT_SHOWN": "0"}) == 0
    with pytest.raises(InvalidRequestError, match="HVDLAB_OUTPUT_SHOWN='much'"):
        shown_limit({"HVDLAB_OUTPUT_SHOWN": "much"})
