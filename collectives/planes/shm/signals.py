"""Counters in shared memory, one per member, and the protocol by which members wait for them.

A member posts by a plain store into its own word, which no other member writes. (One exception: words of a process that is gone,
see ``AgreementBoard.mark_departed``.) A member that waits needs *all* words of a row to reach a value. It first offers its core to other
threads some times (``sched_yield``), which costs them nothing: on a free core that is a poll every half microsecond, on a shared one
it runs the awaited member, for a fraction of the cost of sleeping and waking. Where another process runs on the core, a
yield may last milliseconds. A thread that has work every now and then (a coordinator that forwards records) does not matter; one that is
always busy uses most of the time. So the time that yields lose is limited: a member beyond the limit does without yields for a while,
and only polls for some microseconds. After that it sleeps in the kernel.

Sleeping without lost wake-ups
------------------------------
All members sleep on one word, the doorbell. A sleeper S that waits for ``min(row) >= value``:

    S1  targets[S] = (row, value)        P1  row[P] = value (it was ``before``)
    S2  fence                            P2  fence
    S3  seen = doorbell                  P3  reached = min(row); not more than before, or no target set? -> done
    S4  aborted? row satisfied? -> done  P4  for each target of the row with before < value <= reached: collect the sleeper's bit
    S5  futex_wait(doorbell == seen)     P5  doorbell = a value never used before; futex_wake(bits)

* The fences stand between each side's store and its load of the other's word, so it can't happen that S4 misses P1
  *and* P3 misses S1. If S4 finds the value reached, S does not sleep.
* Let P be the member whose store is the last that S waits for. (Stores become visible in one order on x86-64.) Its
  P3 comes after its fence and so sees all words that S needs. And P's own word had not reached the value before. If S4 missed P1, then P3
  sees the target, P4 finds it satisfied, and P5 changes the doorbell after S3 read it: S5 either returns at once or is woken. A member that
  stored earlier finds the target unsatisfied and leaves it; the last one won't.
* Sleepers whose value P's word had reached before are another member's to wake. So one member wakes the others, once: where a hundred of them share two
  cores, most have not run yet, and still have their targets set, when the first ones post the next step.
* ``before`` is the value that P has completed these steps for. If an exception ends them early (an interrupt, on the board), P's next post makes up for it.
* P5 is an unlocked store by several members, so one may overwrite another's. That is harmless because every value is
  unique (a member's own count times the number of ringers, plus its number): any value that is written after S3
  differs from the one that S3 read, so S5 does not sleep on it.
* :meth:`Signals.abort` sets the flag and then does P5 for its own member's bit, from another thread with a number of
  its own. If S4 missed the flag, the doorbell changes after S3. :meth:`Signals.nudge` does the same after words were changed.

No member polls or needs a timeout, and a post costs no system call unless it completes a sleeper's target.
A member that was killed leaves its target set; that costs the others some reads until the generation ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from time import monotonic_ns

from hvdlab.collectives.planes.base import PlaneAborted, PlaneBroken
from hvdlab.collectives.planes.shm.layout import WORD, Words

YIELDS = 100
"""Times that a waiting member offers its core to others before it sleeps: some 70 microseconds on a free core, as long as it takes to
wake a member whose core has gone idle."""
_LONG_YIELD = 1_000_000
"""Nanoseconds from which on a yield means that something other than members runs on the core; members' steps are shorter."""
_LOST_SHARE = 8
"""Long yields may take one part in so many of a member's time …"""
_LOST_LIMIT = 6_000_000
"""… and so many nanoseconds beyond that: more than the two turns that a busy thread gets before it is known to be one."""
_WITHOUT_YIELDS = 250_000_000
"""Nanoseconds for which a member beyond the limit does without yields."""
_LOOKING = 5_000
"""Nanoseconds for which it polls instead, before it sleeps: less than sleeping and waking cost."""

ARRIVED, REDUCED = 0, 1
_TARGETS, _NEEDS = 2, 3
_ROWS = 2  # rows that can be waited for; also the radix of a target


class Signals:
    """View that one member has of the counters. Everything but :meth:`abort`, :meth:`nudge` and :meth:`close` belongs to one thread.

    Args:
        memory: The shared memory.
        layout: Where the words are in it.
        index: This member's position.
        yields: How often a waiting member offers its core to others before it sleeps.
        offset: Byte of the memory at which the words begin, in whole cache lines.

    Attributes:
        arrived: Steps that each member has put into its slots, by member.
        reduced: Steps of which each member has reduced its slice, by member.
        aborted: Set by :meth:`abort`.
    """

    def __init__(
        self, memory: mmap.mmap, layout: Words, index: int, yields: int = YIELDS, offset: int = 0
    ) -> None:
        self._index = index
        self._members = layout.members
        self._yields = yields
        #: When yields begin again, on ``time.monotonic_ns()``.
        self._sleep_until = 0
        #: Nanoseconds that long yields have taken beyond their share, at the time of the last one.
        self._lost = self._lost_at = 0
        self._words = memoryview(memory)[offset : offset + layout.control_bytes].cast("B").cast("Q")
        rows = [self._row(layout, n) for n in range(5)]
        self.arrived, self.reduced, self._targets = rows[ARRIVED], rows[REDUCED], rows[_TARGETS]
        self._rows = (self.arrived, self.reduced)
        self._needs = (rows[_NEEDS], rows[_NEEDS + 1])
        self._views = [self._words, *rows]
        self._doorbell = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._doorbell)
        # A futex distinguishes 32 sleepers. Members with the same bit are woken together, and sleep again if the
        # value is not reached.
        self._bit = 1 << (index % 32)
        self._rung = self._nudged = 0
        #: Per row the value up to which this member has woken all that slept for its word.
        self._covered = [0] * _ROWS
        self._fence = make_fence()
        self._guard = threading.Lock()
        self._closed = False
        self.aborted = False

    def _row(self, layout: Words, number: int) -> memoryview:
        first = layout.row(number) // WORD
        return self._words[first : first + layout.members]

    def post(self, row: int, value: int) -> None:
        """Set this member's counter and wake the members whose wait that completes."""
        words, before = self._rows[row], self._covered[row]
        words[self._index] = value
        with self._fence:
            pass
        # The member that stored last sees all words of the row from here on, with any target that it reads; one scan will do.
        reached = min(words)
        # Most posts find no sleeper. Then ``any`` spares the loop over the targets, with its division for each member.
        if reached > before and any(self._targets):
            self._wake(row, before, reached)
        # Last: if an interrupt ends this post early, the next one starts from the older value, and wakes the
        # sleepers that this one missed.
        self._covered[row] = value

    def _wake(self, row: int, before: int, reached: int) -> None:
        bits = 0
        for member, target in enumerate(self._targets):
            value, awaited = divmod(target, _ROWS)
            if awaited == row and before < value <= reached:
                bits |= 1 << (member % 32)
        if bits:
            # Of 2 * members ringers this one is number ``index``; abort() and nudge() have the other half, so no two ring with one value.
            self._rung += 1
            self._ring(self._rung * 2 * self._members + self._index, bits)

    def _ring(self, unique: int, bits: int) -> None:
        # A futex is 32 bits wide. A value comes again only after 2**32 / (2 * members) rings of one member, and by then no
        # sleeper is still between its S3 and S5.
        self._doorbell.value = unique & 0xFFFFFFFF
        futex_wake(self._address, bits)

    def wait(self, row: int, value: int, deadline: float | None = None) -> None:
        """Return once every member's counter is at least ``value``.

        Raises:
            PlaneAborted: :meth:`abort` was called, also before.
            PlaneBroken: ``deadline`` (``time.monotonic()``) has passed.
        """
        if not self.reached_soon(row, value):
            self.sleep(row, value, deadline)
        elif self.aborted:
            raise PlaneAborted

    def reached_soon(self, row: int, value: int) -> bool:
        """Poll for some time until all words have reached ``value``, and offer the core to other threads. Return whether they have."""
        words = self._rows[row]
        if min(words) >= value:
            return True
        before = monotonic_ns()
        if before < self._sleep_until:
            while monotonic_ns() - before < _LOOKING:
                if min(words) >= value:
                    return True
            return False
        for _ in range(self._yields):
            os.sched_yield()
            now = monotonic_ns()
            # The length first: _is_beyond_limit() counts the time of this yield as lost, and short yields are not to count.
            if now - before > _LONG_YIELD and self._is_beyond_limit(now, now - before):
                self._sleep_until = now + _WITHOUT_YIELDS
                return min(words) >= value
            if min(words) >= value:
                return True
            before = now
        return False

    def _is_beyond_limit(self, now: int, lost: int) -> bool:
        """Add up the time that long yields lose. Return whether it is beyond their limit."""
        # A leaky bucket: long yields fill it with the time that they took, and it empties by an eighth of the time in between.
        self._lost = max(0, self._lost - (now - self._lost_at) // _LOST_SHARE) + lost
        self._lost_at = now
        return self._lost > _LOST_LIMIT

    def sleep(self, row: int, value: int, deadline: float | None = None) -> None:
        """Return once every member's counter is at least ``value``, as :meth:`wait` does, without polls and yields before it sleeps."""
        words = self._rows[row]
        self._targets[self._index] = value * _ROWS + row
        try:
            with self._fence:
                pass
            while True:
                # Before the flag and the words: a post that comes after they were read changes the doorbell,
                # so the kernel does not let this thread sleep.
                seen = self._doorbell.value
                if self.aborted:
                    raise PlaneAborted
                if min(words) >= value:
                    return
                # The clock last: if all have come by now, it is no failure that the time is over as well.
                if expired(deadline):
                    missing = [m for m, word in enumerate(words) if word < value]
                    raise PlaneBroken(f"shared memory: members {missing} did not come in time")
                futex_wait(self._address, seen, self._bit, deadline)
        finally:
            # Also after an exception: a target that stays makes every later post scan for a sleeper that is gone.
            self._targets[self._index] = 0

    def declare(self, parity: int, steps: int) -> None:
        """Store how many steps this member needs (on the board: its digest). Members read it once all have posted the first step."""
        self._needs[parity][self._index] = steps

    def agreed(self, parity: int) -> int:
        """Return the largest number of steps that a member declared."""
        return max(self._needs[parity])

    def declared(self, parity: int) -> memoryview:
        """Return the declarations, by member."""
        return self._needs[parity]

    def nudge(self) -> None:
        """Make this member's waiting thread read the words again, after they have changed. Another thread, always the same; idempotent."""
        with self._guard:
            if not self._closed:
                # A count of its own: another thread posts, and counts ``_rung`` up without the guard.
                self._nudged += 1
                self._ring(self._nudged * 2 * self._members + self._members + self._index, self._bit)

    def abort(self) -> None:
        """Make the running and all later waits raise. Any thread; idempotent."""
        with self._guard:
            if self.aborted or self._closed:
                return
            self.aborted = True
            # Ringers 0 … members-1 are the threads that post, members … 2*members-1 those that abort and nudge. An aborting thread
            # rings once with a count of 0; nudges are counted from 1.
            self._ring(self._members + self._index, self._bit)

    def close(self) -> None:
        """Release the memory. Later calls of :meth:`abort` do nothing."""
        with self._guard:
            if self._closed:
                return
            # Under the guard: abort() and nudge() of other threads would ring in memory that is unmapped.
            self._closed = self.aborted = True
            for view in reversed(self._views):
                view.release()
            # The ctypes object exports the mapping's buffer as the views do: with it ``mmap.close()`` would raise BufferError.
            del self._doorbell


# Linux's futex: sleeping on a 32-bit word, and waking. The calls are the shared kind (no FUTEX_PRIVATE_FLAG), since the word lies in memory
# of several processes. They release the GIL. `*_BITSET` lets one call wake exactly those sleepers that have something to do.
_SYS_FUTEX = 202  # x86-64
_WAIT_BITSET = 9  # its time limit is absolute, on CLOCK_MONOTONIC, as time.monotonic()
_WAKE_BITSET = 10
_EVERYBODY = 0x7FFFFFFF  # how many sleepers one call wakes at most

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, expected: int, bits: int, deadline: float | None = None) -> None:
    """Sleep while the word at ``address`` equals ``expected``, until a :func:`futex_wake` whose bits overlap ``bits``.

    Returns at once if the word differs; may also return early (a signal). ``deadline`` is on ``time.monotonic()``.
    """
    if deadline is None:
        # The results of these calls are not read: a wake-up, a signal, another value and the end of the time all lead back to the
        # caller's loop, which reads words, flag and clock again.
        _syscall(_SYS_FUTEX, address, _WAIT_BITSET, expected, None, None, bits)
        return
    until = max(deadline, 0.0)
    limit = _Timespec(int(until), int(until % 1.0 * 1e9))
    _syscall(_SYS_FUTEX, address, _WAIT_BITSET, expected, ctypes.addressof(limit), None, bits)


def futex_wake(address: int, bits: int) -> None:
    """Wake all that sleep on the word with overlapping ``bits``."""
    _syscall(_SYS_FUTEX, address, _WAKE_BITSET, _EVERYBODY, None, None, bits)


def expired(deadline: float | None) -> bool:
    """Return whether a time on ``time.monotonic()`` has passed; ``None`` never does."""
    return deadline is not None and time.monotonic() >= deadline


def make_fence() -> threading.Lock:
    """Return an object of one thread's own for which ``with fence: pass`` is a full memory fence on x86-64.

    x86-64 keeps loads in order and stores in order, but lets a load overtake an earlier store to another address.
    Any locked instruction drains the stores first, and acquiring and releasing a lock is two of them (in glibc's
    semaphores, which CPython's locks are before 3.13, and in its own ones since).
    """
    return threading.Lock()
