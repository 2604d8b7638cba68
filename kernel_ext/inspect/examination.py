"""One value of a rank under examination: its leaves with their fingerprints, and the answers to the pool's questions."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from hvdlab.bindings.array_source import ArraySource
from hvdlab.collectives.fingerprint import fingerprint
from hvdlab.kernel_ext.inspect.arrays import Bytes
from hvdlab.kernel_ext.inspect.elements import compare, not_finite
from hvdlab.kernel_ext.inspect.leaves import FINGERPRINTS, Found, leaves_of
from hvdlab.kernel_ext.inspect.leaves import Leaves as Walked
from hvdlab.kernel_ext.inspect.scalars import type_name
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.wire.compare import (
    Blocks,
    ComparisonOpened,
    Difference,
    Leaf,
    LeafList,
    Range,
    same_key,
    with_host_digest,
)

NAMED = 3
"""How many of the parts that can't be compared are named."""
EXCERPT = 24
"""Characters of a text that are shown, from the first differing one on."""
BEFORE = 8
"""Characters of a text that are shown in front of the first differing one."""

_ITEMSIZE = {"text": 4, "bytes": 1, "hex": 1}

MOST_IN_ONE = 4000
"""Leaves in one message at most."""


class Examination:
    """An examination, which belongs to the main thread of a rank; the value must not change while it lasts.

    Args:
        value: The value that is examined.
        threads: How many threads make fingerprints.
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
        """The answer about the whole value: its fingerprint, type and counts."""
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
        """The leaves from number ``first`` on, :data:`MOST_IN_ONE` at most."""
        return LeafList(ticket, tuple(self.leaves[first : first + MOST_IN_ONE]))

    def blocks(self, ticket: int, leaves: Sequence[int], on_host: bool = False) -> Blocks:
        """Fingerprints of the blocks of these arrays, and what of them is not finite.

        Args:
            ticket: Of the question.
            leaves: Numbers of the arrays.
            on_host: Whether the fingerprints are to be those of the bytes from now on, wherever the arrays are.
        """
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
        """Fingerprints of blocks; those of texts are only made here, since the pool seldom asks for them."""
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
        """Copy bytes of arrays one behind the other; returns how many."""
        end = 0
        flat = np.frombuffer(target, np.uint8)
        for number, offset, length in ranges:
            flat[end : end + length] = self._read(number, offset, length)
            end += length
        return end

    def compare(
        self, ranges: Sequence[tuple[Range, int]], theirs: memoryview | bytes
    ) -> tuple[Difference, ...]:
        """How these ranges differ from another rank's, which begin at given offsets of ``theirs``."""
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
        """These bytes of a text and an excerpt behind them, as far as the text goes."""
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
    """A text as an array of its characters, so that these can be compared between ranks as elements are."""
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
    """Where two parts of texts begin to differ, and what both have there; one may end where the other goes on."""
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
        return f"{before}{_shown(dtype, part)} (ends)"
    return f"{before}{_shown(dtype, part)}"


def _shown(dtype: str, part: bytes) -> str:
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
