"""A rank in this process: a real InteractiveShell, an engine that carries mail within the process, a played pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.settings import Settings
from hvdlab.kernel_ext.notebook.stdin import NO_STDIN
from hvdlab.kernel_ext.rank import completion
from hvdlab.kernel_ext.rank.agent import RankAgent
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.wire import codec
from hvdlab.kernel_ext.wire.cells import (
    Acknowledge,
    CellDone,
    CellError,
    Clear,
    DiscardCell,
    Display,
    Output,
    PromptReply,
    PromptRequest,
    RunCell,
    Stream,
)
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import TO_POOL, TO_RANK
from support.patience import HOUR, PATIENCE

T = TypeVar("T", bound=Payload)


class FakeEngine:
    """The engine's cells and mail; its control thread handles the played pool's messages, in order."""

    rank, size, local_size = 0, 1, 1
    paused = ""

    def __init__(self) -> None:
        self.settings = Settings()
        self.log: list[tuple[str, Any]] = []
        self.together: list[bool] = []  # whether the report of each cell's end waited for the mail after it
        self.posted: queue.Queue[Any] = queue.Queue()
        self.in_flight: list[Any] = []
        self.errors: list[Exception] = []  # that came out of callbacks; the engine's own mailbox shows them
        self._mail: dict[str, Callable[[int, bytes], None]] = {}
        self._interrupt: Callable[[], None] = lambda: None
        self._leave: Callable[[str], None] = lambda reason: None
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._control = threading.Thread(target=self._serve, name="control")
        self._control.start()

    def begin_cell(self, cell: str, *, announced: bool = False) -> None:
        self.log.append(("begin", cell))

    def end_cell(self, cell: str, error: str | None, *, more: bool = False) -> None:
        self.log.append(("end", error))
        self.together.append(more)

    def post(self, topic: str, body: bytes, to: Sequence[int] | None = None) -> None:
        assert topic == TO_POOL
        mail = codec.decode_to_pool(body)
        self.log.append((type(mail).__name__, mail))
        self.posted.put(mail)

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        self._mail[topic] = callback

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        self._interrupt = callback

    def on_leave(self, callback: Callable[[str], None]) -> None:
        self._leave = callback

    def pause(self, reason: str) -> None:
        self.log.append(("pause", reason))
        self.paused = reason

    def resume(self, reason: str) -> None:
        self.log.append(("resume", reason))
        self.paused = ""

    def plane_text(self, process_set: int = 0) -> str:
        return "shm"

    def links(self, process_set: int = 0) -> dict[str, tuple[int, ...]]:
        return {"same GPU": (1,)}

    def device_planes(self, process_set: int = 0) -> tuple[str, ...]:
        return ("fake/thread",)

    def pending(self) -> list[Any]:
        return self.in_flight

    # -- the pool's calls through the coordinator --

    def mail(self, payload: Payload) -> None:
        body = codec.encode(payload)
        self._todo.put(lambda: self._mail[TO_RANK](-1, body))

    def interrupt(self) -> None:
        self._todo.put(lambda: self._interrupt())

    def leave(self) -> None:
        self._todo.put(lambda: self._leave("told to"))

    def settle(self) -> None:
        """Wait until the control thread has handled all its messages."""
        done = threading.Event()
        self._todo.put(done.set)
        assert done.wait(PATIENCE)

    def close(self) -> None:
        self._todo.put(None)
        self._control.join()

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # reported at the end
                self.errors.append(error)


@dataclass
class Ran:
    """Cell as the pool saw it."""

    done: CellDone
    chunks: list[Any] = field(default_factory=list)

    def text(self, name: str = "stdout") -> str:
        return "".join(c.text for c in self.chunks if isinstance(c, Stream) and c.name == name)

    @property
    def displays(self) -> list[Display]:
        return [c for c in self.chunks if isinstance(c, Display)]

    @property
    def clears(self) -> list[Clear]:
        return [c for c in self.chunks if isinstance(c, Clear)]

    @property
    def error(self) -> CellError:
        assert self.done.error is not None
        return self.done.error


class Pool:
    """The pool's side, played by a thread of the test."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.count = 0
        self.late: list[Output] = []
        self.answers: list[str] = []
        self.asked: list[PromptRequest] = []

    def start(self, source: str, *, label: str = "", line_offset: int = 1, **options: Any) -> str:
        """Run a cell; by default it stands below the line of a magic and is one of the history, as a notebook's."""
        self.count += 1
        options.setdefault("store_history", True)
        cell = f"cell-{self.count}"
        self.engine.mail(RunCell(cell, label or f"[{self.count}]", source, line_offset, **options))
        return cell

    def finish(self, cell: str, *, credit: bool = True) -> Ran:
        chunks: list[Any] = []
        while True:
            mail = self.engine.posted.get(timeout=PATIENCE)
            if isinstance(mail, Output):
                if mail.cell != cell:
                    self.late.append(mail)
                    continue
                for chunk in mail.chunks:  # how texts are spread over messages is a matter of timing
                    last = chunks[-1] if chunks else None
                    if isinstance(chunk, Stream) and isinstance(last, Stream) and chunk.name == last.name:
                        chunk = Stream(chunk.name, chunks.pop().text + chunk.text)
                    chunks.append(chunk)
                if credit:
                    self.engine.mail(Acknowledge(cell, mail.total))
            elif isinstance(mail, PromptRequest):
                self.asked.append(mail)
                self.engine.mail(
                    PromptReply(mail.number, self.answers.pop(0))
                    if self.answers
                    else PromptReply(mail.number, "", NO_STDIN)
                )
            elif isinstance(mail, CellDone):
                assert mail.cell == cell
                self.engine.mail(DiscardCell(cell))
                return Ran(mail, chunks)

    def run(self, source: str, **options: Any) -> Ran:
        return self.finish(self.start(source, **options))

    def ask(self, payload: Payload, kind: type[T]) -> T:
        self.engine.mail(payload)
        return self.expect(kind)

    def read(self, cell: str, length: int) -> str:
        """Return the next ``length`` characters of a cell's output; ``print`` may be torn between its line and the end
        of it."""
        text = ""
        while len(text) < length:
            output = self.expect(Output)
            assert output.cell == cell
            text += "".join(c.text for c in output.chunks if isinstance(c, Stream))
        return text

    def expect(self, kind: type[T]) -> T:
        """Return the next mail of a kind; mail before it is dropped."""
        while True:
            mail = self.engine.posted.get(timeout=PATIENCE)
            if isinstance(mail, kind):
                return mail


class StayingAgent(RankAgent):
    """Agent that only reports that its rank may leave: the loop goes on until a test's script has ended."""

    def __init__(self, shell: InteractiveShell, loop: asyncio.AbstractEventLoop, engine: Engine, **more: Any):
        super().__init__(shell, loop, engine, **more)
        self.left = threading.Event()

    def _leave(self) -> None:
        self.left.set()


class Rank:
    """Rank whose main thread is the test's: :meth:`play` runs its loop while a script plays the pool."""

    def __init__(self, shell: InteractiveShell, *, capture_fds: bool) -> None:
        self.shell = shell
        self.engine = FakeEngine()
        self.loop = asyncio.new_event_loop()
        self.fds = FdCapture() if capture_fds else None
        self.agent = StayingAgent(shell, self.loop, cast(Engine, self.engine), fds=self.fds)
        self.left = self.agent.left
        self.agent.start()

    def play(self, script: Callable[[Pool], None]) -> None:
        """Run the loop on this thread until ``script``, on another, has returned; raises its exception."""
        failure: list[BaseException] = []
        # pytest has put streams of its own in place since the fixture was set up.
        self.agent._setup.pause()
        self.agent._setup.resume()
        with contextlib.ExitStack() as redirected:
            if self.fds is not None:
                for fd, writer in enumerate(self.fds._writers, 1):
                    saved = os.dup(fd)
                    os.dup2(writer, fd)
                    redirected.callback(os.close, saved)
                    redirected.callback(os.dup2, saved, fd)
            self._play(script, failure)
        if failure:
            raise failure[0]

    def _play(self, script: Callable[[Pool], None], failure: list[BaseException]) -> None:

        def act() -> None:
            try:
                script(Pool(self.engine))
            except BaseException as error:  # noqa: BLE001  # raised again by the test's thread
                failure.append(error)
            finally:
                self.loop.call_soon_threadsafe(self.loop.stop)

        thread = threading.Thread(target=act, name="pool")
        thread.start()
        self.loop.run_forever()
        thread.join()

    def run(self, source: str, **options: Any) -> Ran:
        """Run one cell and return the pool's view of it."""
        ran: list[Ran] = []
        self.play(lambda pool: ran.append(pool.run(source, **options)))
        return ran[0]

    def close(self) -> None:
        self.agent.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self.engine.close()


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = ZMQInteractiveShell.instance(config=config)
    yield shell
    ZMQInteractiveShell.clear_instance()


def _rank(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capture_fds: bool) -> Iterator[Rank]:
    adopted: list[Any] = []
    monkeypatch.setattr(context, "adopt", adopted.append)
    monkeypatch.setattr(
        completion, "WITHIN", HOUR
    )  # a busy machine may need more than its seconds for Jedi's first look
    shell.reset(new_session=True)
    rank = Rank(shell, capture_fds=capture_fds)
    assert adopted == [rank.engine]
    yield rank
    rank.close()
    assert not rank.engine.errors


@pytest.fixture
def rank(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Yield a rank that captures the output of Python code."""
    yield from _rank(shell, monkeypatch, False)


@pytest.fixture
def fd_rank(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Yield a rank that captures file descriptors 1 and 2 as well."""
    yield from _rank(shell, monkeypatch, True)
