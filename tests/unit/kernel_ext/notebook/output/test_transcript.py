"""A cell's output is kept, is replayed in the same order, and uses no more room than allowed."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.output import transcript as transcript_module
from hvdlab.kernel_ext.notebook.output import transcript as transcript_recorder
from hvdlab.kernel_ext.notebook.output.transcript import (
    AT_ONCE,
    IN_MEMORY,
    NOTE,
    CellRecorder,
    Ending,
    Entry,
    Spool,
    Transcript,
    TranscriptStore,
    last_lines,
    write_text,
)
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Clear, Display, Stream
from support.patience import PATIENCE

MEGABYTE = "z" * 99 + "\n"
MEGABYTE *= 10_000


class Seen(OutputSink):
    """Sink that remembers its output."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self.events += [(rank, chunk) for chunk in chunks]

    def done(self, rank: int, done: CellDone | None) -> None:
        self.events.append(("done", rank))

    def note(self, text: str, *, warning: bool = False) -> None:
        self.events.append(("warning" if warning else "note", text))

    def text(self, rank: int) -> str:
        return "".join(e[1].text for e in self.events if e[0] == rank and isinstance(e[1], Stream))


def transcript(tmp_path: Path, ranks: int = 2, **kwargs: object) -> Transcript:
    return Transcript("c", "[7]", tuple(range(ranks)), tmp_path / "cell", **kwargs)  # type: ignore[arg-type]


# -- order and contents -----------------------------------------------------------------------------------------------


def test_little_output_makes_no_file(tmp_path: Path) -> None:
    kept = transcript(tmp_path)
    kept.add(0, (Stream("stdout", "a\n"), Display({"text/plain": "b"}, {})))
    kept.note("rank 1 died", warning=True)
    kept.note("rank 1 joins")
    kept.add(1, (Stream("stderr", "c\n"),))
    kept.end(0)
    kept.finish(Ending())
    seen = Seen()
    kept.replay(seen)
    assert seen.events == [
        (0, Stream("stdout", "a\n")),
        (0, Display({"text/plain": "b"}, {})),
        ("warning", "rank 1 died"),
        ("note", "rank 1 joins"),
        (1, Stream("stderr", "c\n")),
        ("done", 0),
    ]
    assert kept.directory is None
    assert list(tmp_path.iterdir()) == []


def test_much_output_goes_to_files_that_one_can_read(tmp_path: Path) -> None:
    kept = transcript(tmp_path)
    for i in range(4):
        kept.add(0, (Stream("stdout", f"begin {i} é\n" + MEGABYTE), Stream("stderr", "warned\n")))
        kept.add(1, (Stream("stdout", f"other {i}\n"),))
    kept.finish(Ending())
    assert kept.in_memory == 0
    assert kept.directory is not None
    whole = "".join(f"begin {i} é\n{MEGABYTE}warned\n" for i in range(4))
    assert (kept.directory / "rank-0.txt").read_text() == whole
    assert os.stat(kept.directory).st_mode & 0o077 == 0
    seen = Seen()
    kept.replay(seen, [0])
    assert seen.text(0) == whole
    assert seen.text(1) == ""
    assert last_lines(kept, [0, 1], 2) == {0: "z" * 99 + "\nwarned\n", 1: "other 2\nother 3\n"}
    kept.remove()
    assert list(tmp_path.iterdir()) == []


CHUNKS: st.SearchStrategy[Entry] = st.one_of(
    st.tuples(st.integers(0, 3), st.builds(Stream, st.sampled_from(["stdout", "stderr"]), st.text())),
    st.tuples(st.integers(0, 3), st.builds(Display, st.dictionaries(st.text(), st.text()), st.just({}))),
    st.tuples(st.integers(0, 3), st.builds(Clear, st.booleans())),
    st.tuples(st.just(NOTE), st.text()),
)


@given(st.lists(st.lists(CHUNKS)))
def test_a_spool_gives_back_what_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Entry]]
) -> None:
    spool = Spool(tmp_path_factory.mktemp("spool") / "cell")
    for batch in batches:
        spool.append(batch)
    given = [entry for batch in batches for entry in batch]
    surrogates = [
        (rank, what.encode("utf-8", "backslashreplace").decode() if isinstance(what, str) else what)
        for rank, what in given
    ]
    assert list(spool.entries()) == surrogates


def test_displays_that_were_replaced_do_not_come_again(tmp_path: Path) -> None:
    kept = transcript(tmp_path, ranks=1)
    for i in range(5):
        kept.add(0, (Clear(True), Display({"text/plain": f"plot {i}"}, {})))
    kept.add(0, (Display({"text/plain": "bar 0"}, {}, "bar"),))
    for i in range(1, 5):
        kept.add(0, (Display({"text/plain": f"bar {i}"}, {}, "bar", update=True),))
    seen = Seen()
    kept.replay(seen)
    assert [e[1].data["text/plain"] for e in seen.events if isinstance(e[1], Display)] == [
        "plot 4",
        "bar 0",
        "bar 4",
    ]


# -- when there is no room --------------------------------------------------------------------------------------------


def test_a_full_disk_loses_what_comes_then_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = transcript(tmp_path, ranks=1)
    kept.add(0, (Stream("stdout", MEGABYTE),))

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(4):
        kept.add(0, (Stream("stdout", MEGABYTE),))
    monkeypatch.undo()
    kept.finish(Ending())
    assert kept.lost == 2 * len(MEGABYTE)
    assert "No space left on device" in kept.why
    assert kept.in_memory <= AT_ONCE + len(MEGABYTE)
    seen = Seen()
    kept.replay(seen)
    assert seen.text(0) == MEGABYTE * 3


def test_no_descriptor_is_needed_between_writes(tmp_path: Path) -> None:
    kept = transcript(tmp_path, ranks=64)
    before = len(os.listdir("/proc/self/fd"))
    for rank in range(64):
        kept.add(rank, (Stream("stdout", MEGABYTE[:100_000]),))
    assert kept.on_disk > 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_older_cells_make_room_and_the_rest_is_counted(tmp_path: Path) -> None:
    kept = TranscriptStore(tmp_path / "output", limit=5_000_000)
    for number in range(3):
        recorder = kept.record(f"c{number}", f"[{number}]", (0,), Seen())
        for _ in range(2):
            recorder.output(0, (Stream("stdout", MEGABYTE),))
        recorder.transcript.finish(Ending())
    assert kept.find("0") is None
    assert len(list((tmp_path / "output").iterdir())) == 2
    recorder = kept.record("big", "[8]", (0,), Seen())
    for _ in range(8):
        recorder.output(0, (Stream("stdout", MEGABYTE),))
    recorder.transcript.finish(Ending())
    assert kept.find("1") is None
    assert recorder.transcript.lost > 0
    assert "HVDLAB_OUTPUT_KEPT" in recorder.transcript.why
    size = sum(path.stat().st_size for path in (tmp_path / "output").rglob("*") if path.is_file())
    assert size <= 5_000_000
    kept.close()
    assert list((tmp_path / "output").iterdir()) == []


def test_many_small_cells_are_not_kept_for_ever(tmp_path: Path) -> None:
    kept = TranscriptStore(tmp_path / "output")
    for number in range(1000):
        recorder = kept.record(f"c{number}", f"[{number}]", (0,), Seen())
        recorder.output(0, (Stream("stdout", "m" * (IN_MEMORY - 1)),))
        recorder.transcript.finish(Ending())
    assert sum(r.transcript.in_memory for r in kept.all()) <= 33 << 20
    assert not (tmp_path / "output").exists()
    assert kept.find("999") is not None


def test_cell_that_did_not_begin_is_forgotten_after_close_too(tmp_path: Path) -> None:
    kept = TranscriptStore(tmp_path / "output")
    kept.record("c", "[7]", (0,), Seen())
    kept.close()
    kept.forget("c")
    assert kept.all() == []


def test_cell_that_is_shown_makes_no_room_and_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript_module, "KEPT_IN_MEMORY", 250)
    kept = TranscriptStore(tmp_path / "output")
    for number in range(3):
        recorder = kept.record(f"c{number}", f"[{number}]", (0,), Seen())
        recorder.output(0, (Stream("stdout", "m" * 100),))
        recorder.transcript.finish(Ending())
    shown, goes_on = threading.Event(), threading.Event()

    def show() -> None:
        with kept.all()[0].transcript.lock:
            shown.set()
            assert goes_on.wait(PATIENCE)

    showing = threading.Thread(target=show)
    showing.start()
    try:
        assert shown.wait(PATIENCE)
        kept.record("c3", "[3]", (0,), Seen())
    finally:
        goes_on.set()
        showing.join()
    assert [one.transcript.cell for one in kept.all()] == ["c0", "c2", "c3"]


def test_late_output_of_cells_that_printed_nothing_before_their_end_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript_module, "KEPT_IN_MEMORY", 250)
    kept = TranscriptStore(tmp_path / "output")
    for number in range(4):
        kept.record(f"c{number}", f"[{number}]", (0,), Seen()).transcript.finish(Ending())
    for number in range(3):
        kept.late(0, f"c{number}", (Stream("stdout", "m" * 100),), lambda: None)
    kept.record("c4", "[4]", (0,), Seen())
    assert [one.transcript.cell for one in kept.all()] == ["c1", "c2", "c3", "c4"]


def test_late_output_counts_although_a_cell_begins_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript_module, "KEPT_IN_MEMORY", 50)
    kept, add = TranscriptStore(tmp_path / "output"), Transcript.add
    kept.record("c0", "[0]", (0,), Seen()).transcript.finish(Ending())

    def add_later(transcript: Transcript, rank: int, chunks: Sequence[Chunk]) -> None:
        kept.record("c1", "[1]", (0,), Seen())
        add(transcript, rank, chunks)

    monkeypatch.setattr(Transcript, "add", add_later)
    kept.late(0, "c0", (Stream("stdout", "m" * 100),), lambda: None)
    kept.record("c2", "[2]", (0,), Seen())
    assert [one.transcript.cell for one in kept.all()] == ["c1", "c2"]


def test_nothing_is_made_where_the_pool_is_gone(tmp_path: Path) -> None:
    kept = TranscriptStore(tmp_path / "removed" / "output")
    recorder = kept.record("c", "[1]", (0,), Seen())
    for _ in range(3):
        recorder.output(0, (Stream("stdout", MEGABYTE),))
    assert not (tmp_path / "removed").exists()
    assert recorder.transcript.lost > 0


# -- recording --------------------------------------------------------------------------------------------------------


def test_another_screen_gets_all_that_was_and_all_that_comes(tmp_path: Path) -> None:
    woken: list[bool] = []
    first, second = Seen(), Seen()
    recorder = CellRecorder(transcript(tmp_path), first)
    recorder.driven(lambda: woken.append(True))
    recorder.output(0, (Stream("stdout", "early\n"),))
    recorder.attach(second, [0])
    recorder.output(0, (Stream("stdout", "late\n"),))
    recorder.output(1, (Stream("stdout", "not asked for\n"),))
    recorder.done(0, None)
    recorder.done(1, None)
    recorder.finished(CellResults((0, 1), {}))
    assert second.text(0) == first.text(0) == "early\nlate\n"
    assert second.text(1) == ""
    assert second.events[-1] == ("done", 0)
    assert woken
    third = Seen()
    recorder.attach(third, [0, 1])
    assert third.text(0) + third.text(1) == "early\nlate\nnot asked for\n"


def test_sink_that_joins_after_last_tick_shows_all_before_the_end(tmp_path: Path) -> None:
    class Paced(Seen):
        """Sink that shows one of its lines at each tick."""

        def tick(self, now: float) -> float | None:
            shown = sum(event == ("tick",) for event in self.events)
            if shown == 3:
                return None
            self.events.append(("tick",))
            return now

        def finished(self, results: CellResults) -> None:
            self.events.append(("finished",))

    paced = Paced()
    recorder = CellRecorder(transcript(tmp_path), Seen())
    recorder.output(0, (Stream("stdout", "a\n"),))
    # The driver finds nothing left to show, and is about to end the run.
    assert recorder.tick(0.0) is None
    recorder.attach(paced, [0])
    recorder.finished(CellResults((0, 1), {}))
    assert paced.events == [(0, Stream("stdout", "a\n")), ("tick",), ("tick",), ("tick",), ("finished",)]
    assert not recorder.attach(Seen(), [0])


def test_what_a_cell_waited_for_is_kept_once_it_is_over(tmp_path: Path) -> None:
    seen, again = Seen(), Seen()
    recorder = CellRecorder(transcript(tmp_path), seen)
    recorder.status("waiting for rank 1", final=False)
    recorder.status("rank 1 came after 14 s", final=True)
    recorder.attach(again, [0, 1])
    assert seen.events == [("warning", "waiting for rank 1"), ("warning", "rank 1 came after 14 s")]
    assert again.events == [("note", "rank 1 came after 14 s")]


def test_the_whole_is_written_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript_module, "IN_MEMORY", 10)
    kept = transcript(tmp_path)
    for i in range(3):
        for rank in (0, 1):
            kept.add(rank, (Stream("stdout", f"step {i}\n"), Display({"text/plain": f"figure {rank}"}, {})))
    kept.note("rank 1 died")
    file = tmp_path / "all.txt"
    assert write_text(kept, file, [0, 1]) == file.stat().st_size
    assert file.read_text().count("[0,1] step") == 3
    assert "[0] figure 0\n" in file.read_text()
    assert "rank 1 died\n" in file.read_text()
    write_text(kept, file, [1])
    assert file.read_text().startswith("step 0\nfigure 1\n")


def test_a_sink_that_fails_neither_stops_another_nor_what_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Seen):
        def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
            raise BrokenPipeError(f"nobody reads {chunks}")

    first, second = Seen(), Broken()
    recorder = CellRecorder(transcript(tmp_path), first)
    recorder.attach(second, [0])
    recorder.output(0, (Stream("stdout", "a\n"),))
    recorder.done(0, None)
    recorder.finished(CellResults((0,), {}))
    assert first.events == [(0, Stream("stdout", "a\n")), ("done", 0)]
    assert second.events == []
    assert "nobody reads" in caplog.text
    assert recorder.transcript.total == 2

    recorder = CellRecorder(transcript(tmp_path), Broken())
    recorder.output(0, (Stream("stdout", "a\n"),))
    recorder.finished(CellResults((0,), {}))
    assert isinstance(recorder.failure, BrokenPipeError)
    assert not recorder.transcript.running


def test_each_sink_of_a_run_gets_all_and_a_sink_that_fails_is_named_at_the_end(tmp_path: Path) -> None:
    class Broken(Seen):
        def tick(self, now: float) -> float | None:
            raise OSError("no screen")

    first, second, broken = Seen(), Seen(), Broken()
    recorder = CellRecorder(transcript(tmp_path), (first, broken, second))
    recorder.began(5)
    assert recorder.tick(0.0) is None
    recorder.output(5, (Stream("stdout", "a\n"),))
    recorder.done(5, None)
    recorder.finished(CellResults((0, 1, 5), {}))
    assert first.events == second.events
    assert first.text(5) == "a\n"
    assert not broken.text(5)
    assert str(recorder.failure) == "no screen"


def test_a_run_whose_recording_fails_is_shown_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    kept, seen = transcript(tmp_path), Seen()
    monkeypatch.setattr(kept, "add", fail)
    monkeypatch.setattr(transcript_recorder, "report", fail)
    recorder = CellRecorder(kept, seen)
    recorder.output(0, (Stream("stdout", "a\n"),))
    recorder.finished(CellResults((0,), {}))
    assert seen.text(0) == "a\n"
    assert isinstance(recorder.failure, MemoryError)
    assert not kept.running


class SlowFile(io.StringIO):
    """File on a slow disk: a write waits for ``goes_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.goes_on.wait(PATIENCE)
        return super().write(text)

    def close(self) -> None:
        """Keep the text."""


@pytest.mark.parametrize("meanwhile", ["late output", "removal"])
def test_output_is_saved_to_a_slow_disk_as_it_was_at_the_call(tmp_path: Path, meanwhile: str) -> None:
    store = TranscriptStore(tmp_path / "output")
    recorder = store.record("c", "[1]", (0, 1), Seen())
    for _ in range(2):
        recorder.output(0, (Stream("stdout", MEGABYTE),))
        recorder.output(1, (Stream("stdout", "two\n"),))
    recorder.finished(CellResults((0, 1), {}))
    expected = io.StringIO()
    write_text(recorder.transcript, SimpleNamespace(open=lambda *a, **k: nullcontext(expected)), [0, 1])  # type: ignore[arg-type]  # a path, as far as it is used
    file = SlowFile()
    path = SimpleNamespace(open=lambda *args, **kwargs: file)
    saving = threading.Thread(target=write_text, args=(recorder.transcript, path, [0, 1]))
    done = threading.Event()

    def change() -> None:
        if meanwhile == "removal":
            recorder.transcript.remove()
        else:
            store.late(0, "c", (Stream("stdout", MEGABYTE),), lambda: None)
        done.set()

    changing = threading.Thread(target=change)
    saving.start()
    try:
        assert file.reached.wait(PATIENCE)
        changing.start()
        assert done.wait(PATIENCE)
    finally:
        file.goes_on.set()
        saving.join()
        changing.join()
    assert file.getvalue() == expected.getvalue()
