"""The output of a rank, on its way to the pool.

Text and displays of all threads go into one queue, in order; one thread sends it on in batches. The first output
after a quiet time leaves at once, later output within :data:`INTERVAL` seconds or :data:`BATCH` bytes. The pool
acknowledges the bytes that it has; a rank that is a :data:`WINDOW` ahead blocks in ``write``, as on a full pipe. Output
after the end of a cell (by its threads, tasks and subprocesses) has a window of the same size for itself. Output belongs to the
cell that started the thread or task that writes it, also when that outlives the cell. Output of a subprocess belongs to the
cell that began last when it was written.

Writing costs a lock and an append. No message is made on the writer's thread but at the end of a cell.

The thread that sends also watches the owner of a kept pool: without one, output is retained and writers never block.
:class:`ExitFlush` sends the rest before ``os._exit`` ends the rank, which calls no exit handler.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from time import monotonic
from typing import IO, Any, NoReturn, Protocol, cast

from hvdlab.kernel_ext.rank.output_log import OutputEngine, OutputLog
from hvdlab.kernel_ext.rank.pipes import FdCapture, PipeText, receive
from hvdlab.kernel_ext.rank.widgets import WidgetOutputs
from hvdlab.kernel_ext.wire.cells import ACK_BYTES, CellDone, Chunk, Clear, Display, Stream
from hvdlab.kernel_ext.wire.crash_ring import CrashRing
from hvdlab.launch.processes import open_process

WINDOW = 8 << 20
"""Bytes of a cell's output that may be on their way without the pool having taken them."""
LEAST_WINDOW = 2 << 20
ON_THE_WAY = 64 << 20
"""The same for all ranks of a pool together, if that leaves each at least :data:`LEAST_WINDOW`."""
BATCH = 64 << 10
"""Bytes that are sent without waiting for the interval."""
INTERVAL = 0.05
"""Seconds between two messages of a rank that writes slowly."""
LINGER = 0.003
"""Seconds that even the first output waits for the rest of its line, as ``print`` writes the line's end separately."""
GAP = 0.0002
"""Seconds that must lie between two writes for a subprocess to have written something; none starts and ends in less."""
PIECE = 256 << 10
"""A single write is taken apart into pieces of this many characters."""
MESSAGE = 1 << 20
"""Bytes of output in one message, about."""
UNBOUNDED = 1 << 62
"""More than a cell can write."""

_Entry = tuple[str, str, int] | tuple[Display | Clear, None, int]


def window_of(ranks: int) -> int:
    """Return the window of each of so many ranks."""
    return max(LEAST_WINDOW, min(WINDOW, ON_THE_WAY // max(1, ranks)))


class OutputQueue:
    """The queue, its window and the thread that sends.

    Any thread may write. :meth:`acknowledge` is meant for the control thread and never blocks for long: the lock that it takes is
    not held while a thread sends or waits.

    Args:
        engine: Sends mail, and knows the number of ranks.
        fds: Redirected descriptors, if there are any.
        unsent: Gets a copy of everything first, for the case that this process is killed before it has sent it.

    Attributes:
        widgets: Widgets that take output of a thread in the place of the cell.
        on_absence: Called on the thread that sends, with a lock held, when the process has ended that took the output.
    """

    def __init__(
        self,
        engine: OutputEngine,
        *,
        fds: FdCapture | None = None,
        unsent: CrashRing | None = None,
    ) -> None:
        self.widgets = WidgetOutputs()
        self._unsent = unsent
        self._engine = engine
        self._window = WINDOW
        self.sent = OutputLog(engine)
        self._fds = fds
        #: Set in a forked child: on each write, a flag costs less than asking for the process's number.
        self._forked = False
        # Reentrant, because a finalizer that prints may run anywhere, also while this thread holds the lock.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        #: Owned while entries leave, so that batches of several threads keep their order. Acquired before
        #: `_lock`, never after it. Reentrant, since a finalizer that prints may send within a batch.
        self._sending = threading.RLock()
        self._entries: deque[_Entry] = deque()
        self._late: deque[tuple[str, _Entry]] = deque()  # written after the end of these cells
        self._late_queued = 0  # bytes in _late
        self._late_leaving = 0  # bytes that were in _late and are not in the log's total yet
        self._late_taken = 0  # bytes of late output that the pool has taken
        self._over = False  # the end of the current cell is on its way, and all further output is late
        self._queued = 0  # bytes in _entries
        self._lands = False  # whether the bytes that were read from a pipe last are in the crash ring
        self._total = 0  # bytes of the current cell, queued ones included
        self._taken = 0  # bytes of those that the pool has taken
        self._cell = ""
        #: Whether the thread that sends was woken since it last sent: further writes need not wake it.
        self._woken = False
        #: Whether a batch is full, or a writer waits for room: then the interval is not waited for.
        self._urgent = False
        self._closed = False
        #: Whether the thread that sends does not watch the pipes, since there is no room for their bytes: it waits to be woken.
        self._pipes_unwatched = False
        self._attendance = OwnerWatch()
        self.on_absence: Callable[[], None] = lambda: None
        self._last_write = 0.0
        # Not a condition: the thread that sends waits in one selector for the pipes and the owner's end as well.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hvdlab-output", daemon=True)
        _captures.add(self)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def close(self) -> None:
        """Send the rest and end. Writers that wait for room go on, and their text is dropped from then on."""
        if self._closed:
            return
        # Before `_closed`: from then on writers drop their text.
        self.flush()
        with self._lock:
            self._closed = True
            self._room.notify_all()
        self._wake()
        self._thread.join()
        with self._lock:
            # Under the lock that `_wake` takes: a writer would otherwise write to the file that gets this number next.
            os.close(self._wake_fd)
            self._wake_fd = -1
            unsent, self._unsent = self._unsent, None
            if unsent is not None:
                unsent.close()

    # -- cells --------------------------------------------------------------------------------------------------------

    def begin_cell(self, cell: str) -> None:
        """Attribute further output to ``cell``, which gets a window of its own."""
        if self._fds is not None and not self._forked:
            self._drain_available(self._fds)
        # Both locks: entries are sent under the current cell's name, so none of the former cell may be left,
        # or on its way, when the name changes.
        with self._sending, self._lock:
            self._send_queued()
            self._cell, self._total, self._taken, self._over = cell, 0, 0, False
            self._window = window_of(self._engine.size)
            if self._unsent is not None:
                self._unsent.begin(cell, self._window)
            self._room.notify_all()
            unwatched = self._pipes_unwatched
        if unwatched:  # the new window has room for the bytes of processes that earlier cells have left
            self._wake()

    @property
    def is_empty(self) -> bool:
        """Return whether the current cell has written nothing, as far as is known without a look into the pipes."""
        return not self._total

    def acknowledge(self, cell: str, taken: int) -> None:
        """Make room: the pool has taken ``taken`` bytes of the cell's output. Control thread; does not block."""
        self.sent.acknowledge(cell, taken)
        with self._lock:
            # Never less than before: discard_cell() opens the window for good, and an acknowledgement that
            # was on its way must not close it again.
            if cell == self._cell and taken > self._taken:
                self._taken = taken
                if self._unsent is not None:
                    self._unsent.acknowledge(taken)
                self._room.notify_all()
            unwatched = self._pipes_unwatched
        if unwatched:
            self._wake()

    def acknowledge_late(self, taken: int) -> None:
        """Make room: the pool has taken ``taken`` bytes of the output after the ends of cells. Control thread; does not block."""
        with self._lock:
            # More than was sent: that was to a former process of this rank.
            self._late_taken = max(self._late_taken, min(taken, self.sent.late_total))
            self._room.notify_all()
            unwatched = self._pipes_unwatched
        if unwatched:
            self._wake()

    def finish(self, done: CellDone) -> None:
        """Send the rest of the cell's output, then its end.

        Waits for room as a writer does: the output of its subprocesses would otherwise come after its end.
        """
        if self._late:
            self.flush()  # output of earlier cells, written until now, comes before this cell's end
        if self._fds is not None and not self._forked:
            self._drain_all(self._fds)
        # Until the end is sent no other thread sends: late output would come before it.
        with self._sending:
            with self._lock:
                # Set before the rest is sent: text that another thread queued after that would follow the end of the cell.
                self._over = True
                self._room.notify_all()
            self._send_entries()
            self.sent.done(done)

    def discard_cell(self, cell: str) -> None:
        """Drop the cell, of which the pool has everything. If it still runs, its further output goes nowhere. Control thread."""
        self.sent.discard_cell(cell)
        self.acknowledge(cell, UNBOUNDED)

    def set_owner(self, pid: int, started: int, near: bool = True) -> None:
        """Set the process that acknowledges output, as :class:`SetOwner` does; none if ``pid`` is 0. Control thread.

        Without an owner the newest output of each cell is kept, and no writer waits for room.
        """
        self._attendance.set_owner(pid, started, near)
        if not pid:
            self.sent.allow_trimming()
        self.acknowledge_late(self.sent.late_total)  # the former process may have taken it, and is not asked
        self._wake()

    def resend(self, cells: Sequence[tuple[str, int, int]]) -> None:
        """Send again the output of these cells that the pool has missed, as :class:`ResendFrom` asks. Control thread.

        A cell for which the pool no longer waits can't fill a window: its output goes nowhere.
        """
        self.sent.resend(cells)
        # Late output is not kept, so bytes of it that were lost will never be acknowledged.
        self.acknowledge_late(self.sent.late_total)
        known = {cell: taken for cell, _, taken in cells}
        self.acknowledge(self._cell, known.get(self._cell, UNBOUNDED))

    def flush(self) -> None:
        """Send all that was written before, the pipes of fd 1 and 2 included, on the calling thread."""
        if self._forked:
            return
        if self._fds is not None:
            self._drain_fds()
        with self._sending:
            # Once more: entries are sent as those of the cell that is current then, and other threads have perhaps queued some since.
            self._send_queued()

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, text: str) -> None:
        """Queue text of stream ``name``. Blocks while the window is exhausted; KeyboardInterrupt breaks that."""
        if self._forked:
            self._write_in_child(name, text)
            return
        if self.widgets.entered and self.widgets.write(name, text):
            return
        if self._fds is not None:
            # Output of subprocesses and C code since the last write belongs before this text. They need time to write,
            # hence looking is only worth a system call when some has passed.
            now = monotonic()
            if now - self._last_write > GAP:
                self._drain_fds()
            self._last_write = now
        cell = CELL.get() or cell_of_thread()  # not by a function: it would be a tenth of a short write
        # A piece fits into the crash ring and into the smallest window, whatever number of bytes its
        # characters have.
        if len(text) > PIECE:
            for start in range(0, len(text), PIECE):
                self._put(_entry(name, text[start : start + PIECE]), cell)
        else:
            # ASCII, the usual case, has as many bytes as characters: this thread need not encode it to count.
            self._put((name, text, len(text)) if text.isascii() else _entry(name, text), cell)

    def put(self, chunk: Display | Clear) -> None:
        """Queue a display or a clear, in order with the text."""
        if self._forked:
            return  # a forked child has no thread that sends
        if self.widgets.entered and self.widgets.put(chunk):
            return
        if self._fds is not None:
            self._drain_fds()
        # Never zero: a message without bytes would not be sent again after a coordinator has lost it.
        size = 16
        if isinstance(chunk, Display):
            size += sum(len(v) if isinstance(v, str) else 64 for v in chunk.data.values())
        self._put((chunk, None, size), current_cell())

    def _put(self, entry: _Entry, cell: str = "", wait: bool = True, landed: PipeText | None = None) -> None:
        size = entry[2]
        with self._lock:
            if wait and self._total + size - self._taken > self._window and not self._attendance.absent:
                # First, since the cell can end while this thread waits: its text is late then.
                self._await_room(size, cell)
            if self._over or (cell and cell != self._cell):
                self._put_late(entry, cell or self._cell, wait, landed)
                return
            if self._closed:
                return
            # The ring first: a rank that is killed here leaves the text to the fork server, which compares byte counts with the notebook.
            unsent = self._unsent
            if unsent is not None:
                if landed is not None:
                    counted = unsent.append_spliced(landed.stream, landed.text, landed.size, landed.cut)
                elif entry[1] is None:
                    counted = unsent.append_display(entry[0], size)
                else:
                    counted = unsent.write(entry[0], entry[1])
                if counted != size:
                    size, entry = counted, cast(_Entry, (*entry[:2], counted))
            if landed is not None and not size:
                return  # the beginning of a character, of which the rest has not come
            self._entries.append(entry)
            # The count last: an interrupt before it makes the window too wide by one entry, never too narrow for ever.
            self._queued += size
            self._total += size
            if self._woken and (self._urgent or self._queued < BATCH):
                return
            self._woken = True
            self._urgent = self._queued >= BATCH
        self._wake()

    def _put_late(self, entry: _Entry, cell: str, wait: bool, landed: PipeText | None) -> None:
        """Queue output of a cell that has ended. The caller holds the lock."""
        if landed is not None and self._unsent is not None:
            # Without the text, since the ring is the current cell's. But the bytes must count as consumed:
            # the fork server would report them as unread after a death.
            self._unsent.append_spliced(landed.stream, "", landed.size, landed.cut)
        size = entry[2]
        if not size and entry[1] is not None:
            return
        if wait and self._late_ahead() + size > self._window:
            self._wait_until(lambda: self._late_ahead() <= max(0, self._window - size))
        if self._closed:
            return
        self._late.append((cell, entry))
        # Afterwards: if an interrupt comes between, too little is counted until the queue is sent, not too much for ever.
        self._late_queued += size
        self._wake()

    def _late_ahead(self) -> int:
        """Return the number of bytes that were written after the ends of cells and that the pool has not taken. The caller holds the lock."""
        return self._late_queued + self._late_leaving + self.sent.late_total - self._late_taken

    def _await_room(self, size: int, cell: str = "") -> None:
        """Wait for room in the current cell's window, unless output of ``cell`` is late: that has another. The caller holds the lock."""

        def is_room() -> bool:
            # The pool may never acknowledge the last ACK_BYTES. So an entry that is about as large as the window, or larger, waits for
            # the bytes before those only.
            fits = self._total - self._taken <= max(ACK_BYTES, self._window - size)
            return fits or self._over or bool(cell and cell != self._cell)

        if not is_room():
            # The pool acknowledges nothing that has not left: the interval would only add to the wait.
            self._urgent = True
            self._wait_until(is_room)

    def _wait_until(self, is_room: Callable[[], bool]) -> None:
        """Wait for room; without limit there is where no process takes the output, and at the end of the rank."""
        self._wake()
        self._room.wait_for(lambda: self._closed or self._attendance.absent or is_room())

    def _write_in_child(self, name: str, text: str) -> None:
        """In a process that user code forked there is no thread that sends: write to the descriptor, which is ours."""
        raw = memoryview(text.encode("utf-8", "backslashreplace"))
        fd = 2 if name == "stderr" else 1
        while raw:
            raw = raw[os.write(fd, raw) :]

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_queued(self) -> None:
        """Send everything queued, late output last; the caller holds ``_sending``."""
        self._send_entries()
        self._send_late()

    def _send_entries(self) -> None:
        """Send the entries that the current cell has queued so far; the caller holds ``_sending``.

        Entries that an interrupt keeps from the log stay in the queue.
        """
        # Not those that come meanwhile: a writer that goes on is ahead by a few bytes each time, and each time they would be a message.
        with self._lock:
            left = len(self._entries)
            # Together with the count: all that is queued from here on wakes the thread that sends again.
            self._woken = self._urgent = False
        while left:
            taken: list[_Entry] = []
            size, cell = 0, self._cell
            # Shows after an interrupt whether the log has got the entries: they must be neither lost nor sent twice.
            before = self.sent.total(cell)
            try:
                with self._lock:
                    while self._entries and len(taken) < left and size < MESSAGE:
                        entry = self._entries[0]
                        taken.append(entry)
                        self._entries.popleft()
                        size += entry[2]
                    self._queued -= size
                if not taken:
                    return  # a finalizer that printed on this thread has sent them
                left -= len(taken)
                total = self.sent.output(cell, _merged(taken), size, unattended=self._attendance.absent)
            except BaseException:
                if taken and self.sent.total(cell) == before:
                    self._put_back(taken)
                raise
            with self._lock:
                # The log's count is right: an interrupt can have come between an entry, or its copy in the ring, and the count here.
                if total is not None and not self._entries and cell == self._cell:
                    self._total = total
                    if self._unsent is not None:
                        self._unsent.set_total(total)

    def _put_back(self, taken: list[_Entry]) -> None:
        """Queue entries again that were not sent, before all others. The caller holds ``_sending``."""
        with self._lock:
            if self._entries and self._entries[0] is taken[-1]:
                taken.pop()  # the interrupt came before it was removed
            self._entries.extendleft(reversed(taken))
            self._queued = sum(entry[2] for entry in self._entries)
            self._woken = True
        self._wake()

    def _send_late(self) -> None:
        if not self._late:
            return  # a writer that adds to it from here on wakes the thread that sends
        with self._lock:
            late, self._late, self._late_queued = self._late, deque(), 0
            leaving = sum(entry[2] for _, entry in late)
            # Counted until the log counts it: a writer would take the bytes on their way for room.
            self._late_leaving += leaving
        try:
            while late:
                cell, size, entries = late[0][0], 0, list[_Entry]()
                while late and late[0][0] == cell and size < MESSAGE:
                    _, entry = late.popleft()
                    size += entry[2]
                    entries.append(entry)
                self.sent.late(cell, _merged(entries), size)
                leaving -= size
                self._late_left(size)
        finally:
            self._late_left(leaving)

    def _late_left(self, size: int) -> None:
        """Stop counting bytes that the log counts now, or that an interrupt lost."""
        with self._lock:
            self._late_leaving -= size
            # Until here they were counted twice, which may have made a writer wait.
            self._room.notify_all()

    def _drain_fds(self) -> None:
        fds = self._fds
        assert fds is not None
        # A finalizer prints on a thread that owns `_lock`: the thread that reads now would wait for it, and this one for the pipes.
        # Output that waits in the pipes comes after the finalizer's text then.
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks it
            return
        with fds.lock:
            self._put_pieces(fds.read(self._room_for_pipes(), self._receive_for_window))

    def _drain_available(self, fds: FdCapture) -> None:
        """Queue the bytes that are in the pipes now, whether or not there is room: processes wrote them before the next cell.

        They are no more than the pipes have room for.
        """
        with fds.lock:
            written = fds.written()
            # More than once only if an interrupt left bytes of one pipe landed, which come before those of the other.
            while not fds.has_read(written):
                self._put_pieces(fds.read_available(self._receive))

    def _put_pieces(self, pieces: Iterable[PipeText]) -> None:
        for piece in pieces:
            # Must not wait for room: the thread that sends comes through here, and no room comes without it.
            self._put(_entry(piece.stream, piece.text), wait=False, landed=piece if self._lands else None)

    def _room_for_pipes(self) -> int:
        """Return the number of bytes that may be read from the pipes now: they are the cell's, or came after its end."""
        if self._attendance.absent:
            return self._window
        return self._window - (self._late_ahead() if self._over else self._total - self._taken)

    def _drain_all(self, fds: FdCapture) -> None:
        """Send the bytes that are in the pipes now. Later ones are left there, since a process can write for ever."""
        with fds.lock:
            written = fds.written()
        while True:
            with fds.lock:
                if fds.has_read(written):
                    return
            with self._lock:
                if self._closed:
                    return
                self._await_room(1)
            self.flush()

    def _receive_for_window(self, stream: str, pipe: int, limit: int) -> bytes:
        """Take bytes out of a pipe, if there is room: as text, those before them may have become longer than they were."""
        with self._lock:
            room = self._room_for_pipes()
            if room <= 0:
                raise BlockingIOError
            return self._receive(stream, pipe, min(limit, room))

    def _receive(self, stream: str, pipe: int, limit: int) -> bytes:
        """Take bytes out of a pipe, in such a way that they outlive this process if that is possible."""
        with self._lock:
            self._lands = self._unsent is not None
            if self._unsent is not None:
                try:
                    return self._unsent.splice_in(stream, pipe, limit)
                except BlockingIOError:
                    raise
                except OSError:  # there is no room for them; the pipe still has them
                    self._lands = False
            return receive(stream, pipe, limit)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            due, queued, watching = 0.0, False, False
            while True:
                self._attend(selector)
                watching = self._watch(selector, watching)
                now = monotonic()
                waiting = bool(self._entries or self._late)
                if waiting and not queued:
                    due = max(due, now + LINGER)
                queued = waiting
                if queued and (self._urgent or now >= due):
                    with self._sending:
                        self._send_queued()
                    due, queued = monotonic() + INTERVAL, False
                for key, _ in selector.select(due - now if queued else None):
                    if key.fd == self._wake_fd:
                        # Before the next look at the queue: a wake-up that comes after the read is for entries that this look may miss, and it
                        # makes the descriptor readable again.
                        os.eventfd_read(self._wake_fd)
                    elif self._attendance.owns(key.fd):
                        self._attendance.on_exit(selector, self._owner_exited)
                    else:
                        self._drain_fds()
                if self._closed:
                    self._attendance.close(selector)
                    return

    def _attend(self, selector: selectors.BaseSelector) -> None:
        self._attendance.update(selector)
        # Writers that wait for room check `absent` only when they are notified.
        if self._attendance.absent:
            self._free_writers()

    def _owner_exited(self) -> None:
        self.sent.allow_trimming()
        self._free_writers()
        self.on_absence()

    def _free_writers(self) -> None:
        with self._lock:
            self._room.notify_all()

    def _watch(self, selector: selectors.BaseSelector, watching: bool) -> bool:
        """Watch the pipes only while there is room for their bytes: a full window is a full pipe for writers."""
        if self._fds is None:
            return False
        with self._lock:
            # Under the lock that guards the bytes taken: more room is either seen here, or wakes this thread.
            room = self._room_for_pipes() > 0
            self._pipes_unwatched = not room
        if room and not watching:
            for fd in self._fds.readers:
                selector.register(fd, selectors.EVENT_READ)
        elif watching and not room:
            for fd in self._fds.readers:
                selector.unregister(fd)
        return room


def _entry(name: str, text: str) -> _Entry:
    if text.isascii():
        return name, text, len(text)
    raw = text.encode("utf-8", "backslashreplace")  # lone surrogates have no UTF-8
    return name, raw.decode(), len(raw)


def _merged(entries: list[_Entry]) -> list[Chunk]:
    """Chunks in order, neighbouring texts of one stream joined."""
    chunks: list[Chunk] = []
    texts: list[str] = []
    current = ""
    for head, text, _ in entries:
        if text is not None and isinstance(head, str):
            if head != current and texts:
                chunks.append(Stream(current, "".join(texts)))
                texts = []
            current = head
            texts.append(text)
        elif not isinstance(head, str):
            if texts:
                chunks.append(Stream(current, "".join(texts)))
                texts = []
            chunks.append(head)
    if texts:
        chunks.append(Stream(current, "".join(texts)))
    return chunks


_captures: weakref.WeakSet[OutputQueue] = weakref.WeakSet()


def _forked() -> None:
    # The thread that sends, and any thread that held a lock, stayed with the parent.
    for capture in list(_captures):
        capture._forked = True
    _captures.clear()


os.register_at_fork(after_in_child=_forked)


class OwnerWatch:
    """The pool's process, watched by the thread that sends.

    Attributes:
        absent: Whether no process takes output now. Never true where none was named: such a rank ends with its pool.
    """

    def __init__(self) -> None:
        self.absent = False
        self._lock = threading.Lock()
        #: The latest order, until the thread that sends carries it out: only that thread uses the selector.
        self._named: tuple[int, int, bool] | None = None
        self._descriptor = -1

    def set_owner(self, pid: int, started: int, near: bool = True) -> None:
        """Let this process take the output from now on; none does if ``pid`` is 0. Any thread; call :meth:`update` afterwards.

        One that is not ``near`` is not watched: it counts as there until another one is named, or none.
        """
        with self._lock:
            self._named = (pid, started, near)

    def update(self, selector: selectors.BaseSelector) -> None:
        """Watch the process that was named last. Only for the thread that sends, like the methods below."""
        with self._lock:
            named, self._named = self._named, None
        if named is None:
            return
        self.close(selector)
        pid, started, near = named
        try:
            # With the time of its start: the number may belong to another process by now.
            self._descriptor = open_process(pid, started) if pid and near else -1
        except OSError:
            # No descriptor is left, for example: the process counts as there, unwatched, and the thread that sends goes on.
            near = False
        self.absent = self._descriptor < 0 and (near or not pid)
        if self._descriptor >= 0:
            selector.register(self._descriptor, selectors.EVENT_READ)

    def owns(self, descriptor: int) -> bool:
        """Return whether this descriptor, which the selector has found readable, is the process's."""
        return descriptor == self._descriptor

    def on_exit(self, selector: selectors.BaseSelector, then: Callable[[], None]) -> None:
        """Call ``then``, since the process has ended. If another one has been named, do nothing; :meth:`update` watches that one.

        ``then`` runs with the lock held: a new owner could otherwise be set between the check and the call, and ``then`` would undo
        the setup for it.
        """
        with self._lock:
            if self._named is None:
                self.close(selector)
                self.absent = True
                then()

    def close(self, selector: selectors.BaseSelector) -> None:
        """Watch no process any more."""
        if self._descriptor >= 0:
            selector.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


ECHO = "hvdlab.rank.echo"
"""Mail of a rank to itself: once it is back, everything before it has left."""

ECHO_WITHIN = 0.5
"""Seconds that this takes at most; code that calls ``os._exit`` needs the process gone, perhaps because it hangs."""


class EngineMail(Protocol):
    """An engine's mail."""

    @property
    def rank(self) -> int: ...
    def post(self, topic: str, body: bytes, to: tuple[int, ...] | None = None) -> None: ...
    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None: ...


class ExitFlush:
    """Takes the place of ``os._exit``; a process that the rank forked gets the real one.

    Args:
        capture: The output that has not been sent yet.
        engine: Sends it.
    """

    def __init__(self, capture: OutputQueue, engine: EngineMail) -> None:
        self._capture, self._engine = capture, engine
        self._pid = os.getpid()
        self._exit = os._exit
        self._back = threading.Event()

    def install(self) -> None:
        """Replace ``os._exit``."""
        self._engine.on_mail(ECHO, lambda sender, body: self._back.set())
        os._exit = self._leave

    def uninstall(self) -> None:
        """Put the real ``os._exit`` back, unless other code has put another in its place."""
        if os._exit == self._leave:
            os._exit = self._exit

    def _leave(self, status: int) -> NoReturn:
        if os.getpid() == self._pid:
            # On a thread of its own: this one may hold a lock that is needed, or be one that the sending waits for.
            sender = threading.Thread(target=self._send, name="hvdlab-last-words", daemon=True)
            # At a limit on threads there are no last words: code that calls os._exit() needs the process gone.
            with contextlib.suppress(RuntimeError):
                sender.start()
                sender.join(ECHO_WITHIN)
        self._exit(status)

    def _send(self) -> None:
        self._capture.flush()
        self._engine.post(ECHO, b"", (self._engine.rank,))
        self._back.wait(ECHO_WITHIN)


CELL: ContextVar[str] = ContextVar("hvdlab_cell", default="")
"""The cell of the calling context; empty on threads that a cell has started, which do not inherit its context."""
_ATTRIBUTE = "_hvdlab_cell"


def set_current_cell(cell: str) -> None:
    """Attribute all that the calling context does and starts from now on to this cell. Tasks inherit the context."""
    CELL.set(cell)


def current_cell() -> str:
    """Return the cell of the calling thread or task; empty if it is of none."""
    return CELL.get() or cell_of_thread()


def cell_of_thread() -> str:
    """Return the cell that has started the calling thread; empty if none has."""
    return getattr(threading.current_thread(), _ATTRIBUTE, "")


def follow_threads() -> Callable[[], None]:
    """Let a thread belong to the cell of the thread that starts it, since it does not inherit the context.

    Returns a function that undoes it.
    """
    start = threading.Thread.start

    def start_of_cell(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        setattr(self, _ATTRIBUTE, current_cell())
        start(self, *args, **kwargs)

    threading.Thread.start = start_of_cell  # type: ignore[method-assign]  # every thread of the process is to be followed

    def undo() -> None:
        threading.Thread.start = start  # type: ignore[method-assign]  # as above

    return undo


class RankStream(io.TextIOBase):
    """A text stream into a :class:`OutputQueue`. Thread-safe; ``flush`` has nothing to do, output leaves by itself."""

    def __init__(self, capture: OutputQueue, name: str, fd: int | None) -> None:
        self._capture = capture
        self._put = capture.write
        self._name = name
        self._fd = fd
        self._binary = _RankBinary(self)

    @property
    def name(self) -> str:
        """``<stdout>`` or ``<stderr>``."""
        return f"<{self._name}>"

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class declares an attribute
        """Always UTF-8."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]  # the base class declares an attribute
        """Return the name of the error handler: characters that can't be encoded are escaped."""
        return "backslashreplace"

    @property
    def buffer(self) -> IO[bytes]:
        """Return a binary stream into the same place."""
        return cast("IO[bytes]", self._binary)

    def write(self, text: str) -> int:
        """Write text; returns its length. Blocks while the pool is a window behind."""
        if type(text) is not str:
            if not isinstance(text, str):
                raise TypeError(f"write() argument must be str, not {type(text).__name__}")
            # The encoder of messages refuses subclasses of str, such as numpy.str_ and markupsafe.Markup.
            text = str.__str__(text)
        if text:
            self._put(self._name, text)
        return len(text)

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """No."""
        return False

    def flush(self) -> None:
        """Do nothing: text leaves within 50 ms, and all of it before the cell ends."""

    def close(self) -> None:
        """Ignored, as user code that closes ``sys.stdout`` would silence all later cells."""

    def fileno(self) -> int:
        """Return the descriptor that subprocesses may write to; its output arrives in the same place."""
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd


class _RankBinary(io.RawIOBase):
    """``sys.stdout.buffer``: bytes that are decoded as UTF-8, incomplete characters being kept for the next write."""

    def __init__(self, text: RankStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._text.write(self._decoder.decode(raw))
        return len(raw)

    def fileno(self) -> int:
        return self._text.fileno()

    def close(self) -> None:
        """Ignored."""
