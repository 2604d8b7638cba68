"""A rank's side of ``%hvd_diff``: a value taken apart into leaves with fingerprints, and the answers to the pool's questions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import re
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np

from hvdlab.bindings.fingerprints import fingerprint, threads_for
from hvdlab.bindings.framework_hooks import ArraySource, hooks_of, loaded, names
from hvdlab.collectives.engine.engine import Engine
from hvdlab.kernel_ext.rank.completion import TookTooLong, bounded
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.rank.object_tree import (
    FINGERPRINTS,
    Bytes,
    Found,
    Hidden,
    compare,
    leaves_of,
    not_finite,
    type_name,
)
from hvdlab.kernel_ext.rank.object_tree import Leaves as Walked
from hvdlab.kernel_ext.rank.values import PATIENCE
from hvdlab.kernel_ext.wire.codec import TO_POOL, ToPool, encode
from hvdlab.kernel_ext.wire.compare import (
    SPECIAL,
    AskBlocks,
    AskLeaves,
    Blocks,
    Compare,
    Compared,
    ComparisonOpened,
    Difference,
    Gather,
    Leaf,
    LeafList,
    OpenComparison,
    Range,
    same_key,
    with_host_digest,
)
from hvdlab.kernel_ext.wire.values import NOT_SHARED, Acked, ChunkBuffer, SharedBufferReader, TransferChunk

ComparisonRequest = AskLeaves | AskBlocks | Gather | Compare
OVER = "the examination is over"
EVALUATED_WITHIN = 20.0
"""Seconds that an expression may take."""

REMEMBERED = 64
"""Number of comparisons that the pool abandoned before they began and that are remembered."""


class CompareServer:
    """Server of comparisons, one at a time, and of the pool's questions about them. Made on the main thread.

    Args:
        shell: Shell with the variables.
        loop: The main thread's loop.
        engine: The rank's engine; it sends the answers.
    """

    def __init__(self, shell: Any, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self._shell, self._loop, self._engine = shell, loop, engine
        self._open: ComparisonOpened | None = None
        self._questions: asyncio.Queue[ComparisonRequest | int] = (
            asyncio.Queue()
        )  # a number: that examination was released
        self._released: deque[int] = deque(maxlen=REMEMBERED)
        self._buffer = ChunkBuffer()

    # -- control thread -----------------------------------------------------------------------------------------------

    def cached_reply(self, ticket: int) -> ComparisonOpened | None:
        """Return the answer that was sent already, if this comparison is open."""
        # One read: the main thread may close the comparison between two.
        answer = self._open
        return answer if answer is not None and answer.ticket == ticket else None

    def ask(self, question: ComparisonRequest) -> None:
        """Queue a question about a comparison for the main thread, or answer that the comparison is over."""
        if self.cached_reply(question.transfer_id) is None:
            self._reply(Acked(question.ticket, OVER))
        else:
            self._put(question)

    def release(self, transfer_id: int) -> None:
        """Close this comparison, or refuse to open it if it has not begun."""
        # First: run() opens the comparison and then checks this, so that one of the two sees the other.
        self._released.append(transfer_id)
        if self._open is not None and transfer_id == self._open.ticket:
            self._put(transfer_id)

    def release_all(self) -> None:
        """Close the comparison that is open: the rank is leaving."""
        if (opened := self._open) is not None:
            self._put(opened.ticket)

    def _put(self, question: ComparisonRequest | int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the rank is ending
            self._loop.call_soon_threadsafe(self._deliver, question)

    def _reply(self, answer: ToPool) -> None:
        """Send an answer to the pool. Any thread."""
        self._engine.post(TO_POOL, encode(answer))

    # -- main thread --------------------------------------------------------------------------------------------------

    def _deliver(self, question: ComparisonRequest | int) -> None:
        # The examination may have ended since the question came: then nothing would take it out of the queue.
        if isinstance(question, int) or self.cached_reply(question.transfer_id) is not None:
            self._questions.put_nowait(question)
        else:
            self._reply(Acked(question.ticket, OVER))

    async def run(self, request: OpenComparison) -> None:
        """Open a value for comparison, answer, and stay with it until it is released or the pool seems to be gone."""
        if request.ticket in self._released:
            return
        try:
            # The other ranks of this host make fingerprints at the same time.
            examination = ComparedValue(self._value(request), threads_for(self._engine.local_size))
            answer = examination.examined(request.ticket)
        except BaseException as error:  # noqa: BLE001  # evaluating runs the user's code, which may also exit
            self._reply(ComparisonOpened(request.ticket, error=one_line(error)))
            return
        self._open = answer
        self._reply(answer)
        try:
            with SharedBufferReader() as reader:
                await self._serve(examination, reader)
        finally:
            self._open = None
            self._buffer.free()
            while not self._questions.empty():
                late = self._questions.get_nowait()
                if not isinstance(late, int):
                    self._reply(Acked(late.ticket, OVER))

    def _value(self, request: OpenComparison) -> Any:
        if request.special in SPECIAL:
            return special_value(request.special)
        variables = self._shell.user_ns
        if request.expression in variables:
            return variables[request.expression]
        # No interrupt reaches this thread between cells, so an expression that never returns must be left behind.
        try:
            return bounded(
                lambda: eval(request.expression, self._shell.user_global_ns, variables), EVALUATED_WITHIN
            )
        except TookTooLong:
            raise TookTooLong(f"{request.expression} takes longer than {EVALUATED_WITHIN:.0f} s") from None

    async def _serve(self, examination: ComparedValue, reader: SharedBufferReader) -> None:
        assert self._open is not None
        transfer_id = self._open.ticket
        # A release that came before the comparison was open has put nothing into the queue.
        while transfer_id not in self._released:
            # A question or a release that was meant for an earlier examination may come late.
            try:
                question = await asyncio.wait_for(self._questions.get(), PATIENCE)
            except TimeoutError:
                return
            if isinstance(question, int):
                if question == transfer_id:
                    return
                continue
            if question.transfer_id != transfer_id:
                self._reply(Acked(question.ticket, OVER))
                continue
            try:
                answer = self._answer(question, examination, reader)
            except Exception as error:  # noqa: BLE001  # a device may fail, or have no memory left
                answer = Acked(question.ticket, one_line(error))
            self._reply(answer)

    def _answer(
        self, question: ComparisonRequest, examination: ComparedValue, reader: SharedBufferReader
    ) -> ToPool:
        rank = self._engine.rank
        if isinstance(question, AskLeaves):
            return examination.some_leaves(question.ticket, question.first)
        if isinstance(question, AskBlocks):
            return examination.blocks(question.ticket, question.leaves.get(rank, ()), question.on_host)
        if isinstance(question, Gather):
            return self._gathered(question, examination)
        ranges = question.ranges.get(rank, ())
        try:
            with reader.chunk(question.data, question.shared) as theirs:
                return Compared(question.ticket, examination.compare(ranges, theirs))
        except OSError:
            if question.shared is None:
                raise
            return Compared(question.ticket, (), NOT_SHARED)

    def _gathered(self, question: Gather, examination: ComparedValue) -> TransferChunk:
        size = sum(length for _, _, length in question.ranges)
        chunk = self._buffer.put(
            size, lambda target: examination.gather(question.ranges, target), share=question.share
        )
        return TransferChunk(question.ticket, *chunk)


NAMED = 3
"""Number of parts that can't be compared and are named."""
EXCERPT = 24
"""Characters of a text that are shown, from the first differing one on."""
BEFORE = 8
"""Characters of a text that are shown in front of the first differing one."""

_ITEMSIZE = {"text": 4, "bytes": 1, "hex": 1}

MOST_IN_ONE = 4000
"""Leaves in one message at most."""


class ComparedValue:
    """Value under comparison. It belongs to the main thread of a rank, and must not change meanwhile.

    Args:
        value: The value.
        threads: Number of threads that make fingerprints.
        walked: The value's leaves, if they are known.
    """

    def __init__(self, value: Any, threads: int = 1, walked: Walked | None = None) -> None:
        walked = leaves_of(value) if walked is None else walked
        self._type, self._left_out = type_name(type(value)), walked.left_out
        self._arrays: list[ArraySource | None] = []
        self._blocks: list[bytes] = []
        self.leaves: list[Leaf] = []
        with ThreadPoolExecutor(threads, "hvdlab-fingerprints") as pool:
            for found in walked.found:
                self._add(found, pool if threads > 1 else None)

    def _add(self, found: Found, pool: ThreadPoolExecutor | None) -> None:
        array, blocks = found.array, b""
        if array is not None:
            try:
                blocks = array.fingerprints(pool)
            except Exception as error:  # noqa: BLE001  # a device may fail, or have no memory left
                found = Found(found.path, "error", found.type, text=one_line(error))
                array = None
        elif found.long is not None:
            array = _of_long_text(*found.long)
        self._arrays.append(array)
        self._blocks.append(blocks)
        self.leaves.append(
            _array_leaf(found, array, blocks)
            if found.kind == "array" and array is not None
            else _plain_leaf(found, array)
        )

    def examined(self, ticket: int) -> ComparisonOpened:
        """Return the answer about the whole value: its fingerprint, type and counts."""
        arrays = [leaf for leaf in self.leaves if leaf.kind == "array"]
        unknown = [leaf for leaf in self.leaves if leaf.kind in ("opaque", "error")]
        return ComparisonOpened(
            ticket,
            digest=fingerprint(*sorted(fingerprint(*map(_encoded, same_key(leaf))) for leaf in self.leaves)),
            type_name=self._type,
            leaves=len(self.leaves),
            arrays=len(arrays),
            nbytes=sum(leaf.nbytes for leaf in arrays),
            left_out=self._left_out,
            unknown=len(unknown),
            unknown_parts=tuple(
                f"{leaf.path} ({leaf.text or leaf.type})".strip() for leaf in unknown[:NAMED]
            ),
        )

    def some_leaves(self, ticket: int, first: int) -> LeafList:
        """Return the leaves from number ``first`` on, :data:`MOST_IN_ONE` at most."""
        return LeafList(ticket, tuple(self.leaves[first : first + MOST_IN_ONE]))

    def blocks(self, ticket: int, leaves: Sequence[int], on_host: bool = False) -> Blocks:
        """Return fingerprints of the blocks of these arrays, and their elements that are not finite.

        Args:
            ticket: Of the question.
            leaves: Numbers of the arrays.
            on_host: Whether the fingerprints are to be those of the bytes from now on, wherever the arrays are.
        """
        # A device makes fingerprints by another method: where other ranks have this array on the host, only
        # those of the bytes can be compared.
        if on_host:
            for number in leaves:
                self._read_on_host(number)
        odd = [self._not_finite(number) for number in leaves]
        return Blocks(
            ticket,
            tuple(self._blocks_of(n) for n in leaves),
            tuple(n for n, _ in odd),
            tuple(n for _, n in odd),
        )

    def _read_on_host(self, number: int) -> None:
        array = self._arrays[number]
        if array is not None and array.on_device is not None:
            array = self._arrays[number] = replace(array, on_device=None)
            blocks = self._blocks[number] = array.fingerprints()
            self.leaves[number] = with_host_digest(self.leaves[number], blocks)

    def _blocks_of(self, number: int) -> bytes:
        """Return fingerprints of blocks; those of texts are only made here, since the pool seldom asks for them."""
        array = self._arrays[number]
        if array is None or self.leaves[number].kind == "array":
            return self._blocks[number]
        return array.fingerprints()

    def _not_finite(self, number: int) -> tuple[int, int]:
        array = self._arrays[number]
        nans = infs = 0
        if array is not None and self.leaves[number].kind == "array":
            if array.on_device is not None and (found := array.on_device.not_finite()) is not None:
                return found
            for offset in range(0, array.nbytes, array.block):
                part = array.read(offset, min(array.block, array.nbytes - offset))
                more = not_finite(part, array.dtype, array.itemsize)
                nans, infs = nans + more[0], infs + more[1]
        return nans, infs

    def gather(self, ranges: Sequence[Range], target: memoryview) -> int:
        """Copy bytes of arrays one behind the other, and return their number."""
        end = 0
        flat = np.frombuffer(target, np.uint8)
        for number, offset, length in ranges:
            flat[end : end + length] = self._read(number, offset, length)
            end += length
        return end

    def compare(
        self, ranges: Sequence[tuple[Range, int]], theirs: memoryview | bytes
    ) -> tuple[Difference, ...]:
        """Return how these ranges differ from another rank's, which begin at given offsets of ``theirs``."""
        other = np.frombuffer(theirs, np.uint8)
        return tuple(self._difference(one, other[start : start + one[2]]) for one, start in ranges)

    def _difference(self, one: Range, theirs: Bytes) -> Difference:
        number, offset, length = one
        leaf = self.leaves[number]
        if leaf.kind == "value":
            return _first_difference(leaf, self._read_from(number, offset, length), theirs)
        found = compare(self._read(number, offset, length), theirs, leaf.dtype, leaf.itemsize)
        if leaf.dtype != FINGERPRINTS:
            return found
        return Difference(found.count, found.first)

    def _read_from(self, number: int, offset: int, length: int) -> Bytes:
        """Return these bytes of a text and an excerpt behind them, as far as the text goes."""
        array = self._arrays[number]
        size = 0 if array is None else array.nbytes
        return self._read(
            number, offset, max(0, min(length + EXCERPT * self.leaves[number].itemsize, size - offset))
        )

    def _read(self, number: int, offset: int, length: int) -> Bytes:
        array = self._arrays[number]
        if array is None:
            raise LookupError(f"{self.leaves[number].path} has no elements")
        return array.read(offset, length)


def _encoded(part: Any) -> bytes:
    data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
    # With the length: fingerprint() puts the parts together, and "ab", "c" must not equal "a", "bc".
    return len(data).to_bytes(8, "little") + data


def _plain_leaf(found: Found, long: ArraySource | None) -> Leaf:
    digest = fingerprint(found.content) if found.kind == "value" else b""
    if long is None:
        return Leaf(found.path, found.kind, found.type, digest, text=found.text)
    return Leaf(
        found.path,
        found.kind,
        found.type,
        digest,
        long.dtype,
        nbytes=long.nbytes,
        itemsize=long.itemsize,
        block=long.block,
        text=found.text,
    )


def _of_long_text(dtype: str, text: str | bytes) -> ArraySource:
    """Return a text as an array of its characters, so that these can be compared between ranks as elements are."""
    if isinstance(text, str):
        text = text.encode("utf-32-le", "surrogatepass") if dtype == "text" else text.encode()
    raw, itemsize = np.frombuffer(text, np.uint8), _ITEMSIZE[dtype]
    return ArraySource(
        dtype,
        (raw.size // itemsize,),
        "cpu",
        None,
        raw.size,
        itemsize,
        lambda offset, length: raw[offset : offset + length],
    )


def _first_difference(leaf: Leaf, ours: Bytes, theirs: Bytes) -> Difference:
    """Return where two parts of texts begin to differ, with both excerpts; one may end where the other goes on."""
    width = leaf.itemsize
    common = min(ours.nbytes, theirs.nbytes)
    odd = np.flatnonzero(ours[:common] != theirs[:common])
    if not odd.size and ours.nbytes == theirs.nbytes:
        return Difference(0)
    first = int(odd[0]) // width if odd.size else common // width
    return Difference(
        1, first, _excerpt(leaf.dtype, ours, first, width), _excerpt(leaf.dtype, theirs, first, width)
    )


def _excerpt(dtype: str, raw: Bytes, first: int, width: int) -> str:
    begin = max(0, first - BEFORE)
    part = raw[begin * width : (first + EXCERPT) * width].tobytes()
    before = "…" if begin else ""
    if first * width >= raw.nbytes:
        return f"{before}{_part_text(dtype, part)} (ends)"
    return f"{before}{_part_text(dtype, part)}"


def _part_text(dtype: str, part: bytes) -> str:
    if dtype == "text":
        return ascii(part.decode("utf-32-le", "surrogatepass"))
    return repr(part) if dtype == "bytes" else part.decode()


def _array_leaf(found: Found, array: ArraySource, blocks: bytes) -> Leaf:
    return Leaf(
        found.path,
        "array",
        found.type,
        fingerprint(blocks),
        array.dtype,
        array.shape,
        array.device,
        array.nbytes,
        array.itemsize,
        array.block,
        array.requires_grad,
        on_device=array.on_device is not None,
    )


_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# Environment variables that are meant to differ from rank to rank, or that the launcher has set.
_OWN = re.compile(
    r"(.*_)?(RANK|PROCID|LOCALID|NODEID)$|HVDLAB_|HOROVOD_|PMI_|PMIX_|OMPI_|JPY_|IPP_|OLDPWD$|_$"
)


def special_value(name: str) -> Any:
    """Return the value to compare for one of :data:`SPECIAL`."""
    return random_states() if name == "rng" else environment()


def random_states() -> dict[str, Any]:
    """Return the states of the generators that all code of a process shares."""
    found: dict[str, Any] = {"random": random.getstate()[1:]}
    for hooks in loaded():
        found |= hooks.random_states()
    return found


def environment() -> dict[str, Any]:
    """Return versions, environment variables (of secret ones only fingerprints leave the rank) and settings that change results."""
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "machine": platform.processor() or platform.machine(),
            "path": list(sys.path),
            "directory": os.getcwd(),
            "hash randomization": bool(sys.flags.hash_randomization),
        },
        "versions": {
            dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"]
        },
        "variables": {name: _shown(name, text) for name, text in os.environ.items() if not _OWN.match(name)},
        **{name: hooks_of(name).settings() if sys.modules.get(name) else {} for name in names()},
    }


def _shown(name: str, text: str) -> str:
    return Hidden(text) if _SECRET.search(name) else text
