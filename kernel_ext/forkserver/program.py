"""The program of a pool's fork server, whose children are ranks and ipyparallel's controller.

The fork server imports this module first, by its name; heavy modules are imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hvdlab.bindings.framework_hooks import FrameworkPreloads
from hvdlab.kernel_ext.wire import crash_ring
from hvdlab.kernel_ext.wire.cells import CrashOutput, Stream
from hvdlab.launch.forkserver.program import StdPipes

PROGRAM_NAME = f"{__name__}:PROGRAM"
"""The name that a pool's fork server is started with."""

_encode = msgspec.msgpack.Encoder().encode
_left = msgspec.msgpack.Decoder(CrashOutput)


class PoolProgram(FrameworkPreloads):
    """A :class:`~hvdlab.launch.forkserver.program.ForkedProgram`."""

    # Without the last two in the fork server, each rank would import them for itself.
    required: Sequence[str] = (
        "hvdlab.kernel_ext.rank.program",
        "hvdlab.collectives.planes.shm.plane",
        "IPython.core.oinspect",
    )
    # To show a traceback, and to join ipyparallel.
    later: Sequence[str] = (
        "pygments.lexers.python",
        "pygments.formatters.terminal256",
        "stack_data",
        "hvdlab.kernel_ext.forkserver.controller",
    )

    def after_required(self) -> None:
        """Prepare for the user's preloads.

        tqdm chooses between text and widget when it is imported, and frameworks read their environment then.
        """
        from hvdlab.kernel_ext.rank.shell_setup import prepare_progress_bars

        super().after_required()
        prepare_progress_bars()

    def make_area(self) -> int:
        """Return the descriptor of memory for a rank's unsent output; see :class:`~hvdlab.launch.forkserver.program.ForkedProgram`."""
        return crash_ring.make_area()

    def read_area(self, area: int, stdout: bytes, stderr: bytes) -> bytes | None:
        """Return output of an ended rank's last cell that it may not have sent, for :func:`decode_left`."""
        found = crash_ring.read(area)
        if found is None:
            return None
        texts = (
            # Text that the rank had read from a pipe comes before the rest in the pipe.
            (name, (found.unread[name] + raw).decode("utf-8", "replace"))
            for name, raw in (("stdout", stdout), ("stderr", stderr))
        )
        rest = tuple(Stream(name, text) for name, text in texts if text)
        return _encode(msgspec.structs.replace(found.left, rest=rest))

    def run_rank(self, argv: Sequence[str], pipes: StdPipes, area: int) -> int:
        """Run a rank until the pool orders it to leave. Returns the exit code."""
        from hvdlab.kernel_ext.rank.program import run

        return run(argv, pipes, area)

    def run_controller(self, argv: Sequence[str], channel: int) -> int:
        """Run ipyparallel's controller until the fork server is gone. Returns the exit code."""
        from hvdlab.kernel_ext.forkserver.controller import run_forked

        return run_forked(tuple(argv), channel)


PROGRAM = PoolProgram()


def decode_left(left: bytes) -> CrashOutput:
    """Return the output and the cell's end that :meth:`PoolProgram.read_area` has read."""
    return _left.decode(left)
