"""A program that lets ranks' processes die before each step of hvdlab's own code, and reports which output was lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hvdlab.kernel_ext.forkserver.program import PROGRAM, decode_left
from hvdlab.kernel_ext.notebook.cells.dispatch import MessageFate, ReceiveWindow
from hvdlab.kernel_ext.rank.output import OutputQueue
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.wire.cells import Chunk, Output, Stream
from hvdlab.kernel_ext.wire.codec import decode_to_pool
from hvdlab.kernel_ext.wire.crash_ring import CrashRing, make_area
from hvdlab.launch.forkserver.children import SupervisedChild
from hvdlab.launch.forkserver.program import StdPipes

# Between two instructions of these, elsewhere between two lines.
OPCODES = ("crash_ring.py",)
FILES = (*OPCODES, "pipes.py", "output.py", "output_log.py")
NEVER = 0

UMLAUT = "ö".encode()
WRITES = (
    (b"one\n",),
    (b"zw" + UMLAUT[:1],),  # half of a character
    (UMLAUT[1:] + b"lf\n",),
)


class Steps:
    """Counts steps of hvdlab's code, and kills the process before one of them."""

    def __init__(self, die_at: int) -> None:
        self.count, self._die_at = 0, die_at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        directory, name = os.path.split(frame.f_code.co_filename)
        if name not in FILES or "kernel_ext" not in directory:
            return None
        frame.f_trace_opcodes = name in OPCODES
        self.count += 1
        if self.count == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self


def live(pipes: StdPipes, area: int, mail: int, written: int, die_at: int) -> int:
    """Write to descriptor 2, and send that. Returns the number of steps."""

    class PipedEngine:
        size = 1

        def post(self, topic: str, body: bytes) -> None:
            os.write(mail, len(body).to_bytes(4, "little") + body)

    capture = OutputQueue(PipedEngine(), fds=FdCapture(pipes), unsent=CrashRing(area))
    assert capture.sent.register("c")
    capture.begin_cell("c")
    steps = Steps(die_at)
    for texts in WRITES:
        for text in texts:
            os.write(2, text)
            os.write(written, text)
        sys.settrace(steps)
        capture.flush()
        sys.settrace(None)
    return steps.count


def live_and_die(die_at: int) -> tuple[int, str, str]:
    """Return the exit status, a rank's output, and the part of it that is shown."""
    pipes, area = StdPipes.make(), make_area()
    mail, mail_writer = os.pipe()
    written, written_writer = os.pipe()
    child = os.fork()
    if child == 0:
        live(pipes, area, mail_writer, written_writer, die_at)
        os._exit(0)
    for writer in (mail_writer, written_writer, pipes.out[1], pipes.err[1]):
        os.close(writer)
    _, status = os.waitpid(child, 0)
    shown = show(mail, SupervisedChild(0, child, -1, pipes.err[0], pipes.out[0], area))
    expected = os.read(written, 1 << 16).decode("utf-8", "replace")
    for descriptor in (mail, written, pipes.out[0], pipes.err[0], area):
        os.close(descriptor)
    return status, expected, shown


def show(mail: int, child: SupervisedChild) -> str:
    """Return the text that the pool shows: the rank's mail, then the output that it left."""
    arrivals, chunks = ReceiveWindow([0]), list[Chunk | None]()
    while header := os.read(mail, 4):
        message = decode_to_pool(os.read(mail, int.from_bytes(header, "little")))
        assert isinstance(message, Output)
        assert arrivals.output(0, message) is MessageFate.TAKE
        chunks += message.chunks
    left = child.left(PROGRAM)
    assert left is not None
    found = arrivals.take_crash_output(0, decode_left(left))
    assert found is not None
    missing, rest = found
    assert not missing, f"{missing} bytes are said to be lost"
    return "".join(c.text for c in (*chunks, *rest.chunks, *rest.rest) if isinstance(c, Stream))


def main() -> None:
    """Print one line for each step at which something is lost or comes twice; the last line counts the steps."""
    died = 0
    while True:
        status, expected, shown = live_and_die(died + 1)
        if shown != expected:
            print(f"step {died + 1}: wrote {expected!r}, shown is {shown!r}", flush=True)
        if status == 0:
            break
        died += 1
    print(died)


if __name__ == "__main__":
    main()
