"""The modules through which a printed line passes, from ``print`` on a rank to the notebook's own output stream."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec

from hvdlab.collectives.client import Client
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher, CellRequest
from hvdlab.kernel_ext.notebook.output.limit import LimitedSink
from hvdlab.kernel_ext.notebook.output.merge import LineMerger, MergingSink
from hvdlab.kernel_ext.notebook.output.transcript import TranscriptStore
from hvdlab.kernel_ext.notebook.output_channels import LineTracking, RunningCellChannel
from hvdlab.kernel_ext.rank.output import OutputQueue, RankStream
from hvdlab.kernel_ext.wire.cells import CellDone
from hvdlab.kernel_ext.wire.crash_ring import CrashRing, make_area
from hvdlab.magics.cell_strip import Strip, StripSink
from hvdlab.magics.screens import NotebookScreen
from support.fakes.posting_engine import PostingEngine

LIMIT = 13
"""Modules of the rank and of the notebook; the engine and the coordinator between them carry the line as bytes of a mail."""

LINE = "a line that is looked for"
ROOMS = ("hvdlab.kernel_ext.", "hvdlab.magics.")


class Mailbox:
    """Client whose mail comes from the test."""

    def __init__(self) -> None:
        self.mail: Any = None

    def on_mail(self, topic: str, callback: Any) -> None:
        self.mail = callback

    def on_stall(self, callback: Any) -> None: ...
    def post(self, topic: str, body: bytes, to: Any) -> None: ...
    def cell_started(self, cell: str, ranks: Any, *, label: str = "", mail: Any = ()) -> None: ...


class Living:
    def loss_reason(self, rank: int) -> str:
        return ""

    def losses(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}

    def local_pid(self, rank: int) -> int | None:
        return None


@contextmanager
def passed(modules: set[str]) -> Iterator[None]:
    """Add the modules with a call that has the line among its arguments, or returns it."""

    def look(frame: FrameType, event: str, argument: object) -> None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if not module.startswith(ROOMS) or event not in ("call", "return"):
            return
        if code.co_filename == "<string>" or not code.co_names:
            return  # made by dataclasses, or a method of a base that does nothing
        values = (argument,) if event == "return" else tuple(frame.f_locals.values())
        if any(LINE in repr(value) for value in values if _is_data(value)):
            modules.add(module)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_data(value: object) -> bool:
    kinds = (str, bytes, bytearray, memoryview, tuple, list, msgspec.Struct)
    return isinstance(value, kinds) or dataclasses.is_dataclass(value)


def test_a_printed_line_passes_few_modules(capsys: Any) -> None:
    client, modules = Mailbox(), set[str]()
    runs = CellDispatcher(cast(Client, client), Living(), TranscriptStore(Path("/proc/nowhere")))
    channel = LineTracking(RunningCellChannel(cast(Any, None)))
    screen = NotebookScreen(channel, [0, 1], "c")
    shown = LimitedSink(MergingSink(LineMerger([0, 1]), screen), [0, 1], 1 << 20)
    strip = StripSink([0, 1], Strip(channel, lambda: None, "strip", 0.0))
    transcripts = runs._transcripts
    request = CellRequest("print(...)", label="[1]", out=(shown, strip))
    recorder = transcripts.record("c", "[1]", [0, 1], request.out)
    handle = runs.dispatch("c", [0, 1], request, recorder)
    area = make_area()
    arrived = threading.Event()

    def post(topic: str, body: bytes) -> None:
        for rank in (0, 1):
            client.mail(rank, body)
        arrived.set()

    with passed(modules):
        queue = OutputQueue(PostingEngine(post), unsent=CrashRing(area))
        queue.start()
        queue.sent.register("c", "[1]")
        queue.begin_cell("c")
        print(LINE, file=RankStream(queue, "stdout", None))
        assert arrived.wait(10)
        queue.finish(CellDone("c", None, 0.1))
        assert handle.wait(10).ok
    queue.close()
    os.close(area)
    assert f"[0,1] {LINE}\n" in capsys.readouterr().out.replace("0-1", "0,1")
    assert len(modules) <= LIMIT, "\n".join(sorted(modules))
