"""One value of a rank under examination: its leaves with their fingerprints, and what the pool asks about them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdlab.collectives.fingerprint import fingerprint, of_blocks
from hvdlab.kernel_ext.inspect.arrays import ArraySource, Bytes, family
from hvdlab.kernel_ext.inspect.elements import compare, not_finite
from hvdlab.kernel_ext.inspect.leaves import FINGERPRINTS, Found, leaves_of
from hvdlab.kernel_ext.inspect.leaves import Leaves as Walked
from hvdlab.kernel_ext.inspect.messages import Blocks, Difference, Examined, Leaf, Leaves, Range
from hvdlab.kernel_ext.inspect.scalars import type_name
from hvdlab.kernel_ext.rank.failures import one_line

MOST_IN_ONE = 4000
"""Leaves that are told in one message."""


class Examination:
    """Belongs to the main thread of a rank; the value must not change meanwhile.

    Args:
        value: What is looked at.
        threads: Among how many threads fingerprints are made.
        walked: Its leaves, if they are known.
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
                blocks = of_blocks(array.nbytes, array.read, block=array.block, pool=pool)
            except Exception as error:  # noqa: BLE001  # a device may fail, or have no memory left
                found = Found(found.path, "error", found.type, text=one_line(error))
                array = None
        self._arrays.append(array)
        self._blocks.append(blocks)
        self.leaves.append(_plain_leaf(found) if array is None else _array_leaf(found, array, blocks))

    def examined(self, ticket: int) -> Examined:
        """What the whole value is like."""
        arrays = [leaf for leaf in self.leaves if leaf.kind == "array"]
        return Examined(
            ticket,
            digest=fingerprint(*sorted(fingerprint(*map(_encoded, same_key(leaf))) for leaf in self.leaves)),
            type_name=self._type,
            leaves=len(self.leaves),
            arrays=len(arrays),
            nbytes=sum(leaf.nbytes for leaf in arrays),
            left_out=self._left_out,
            unknown=sum(leaf.kind in ("opaque", "error") for leaf in self.leaves),
        )

    def some_leaves(self, ticket: int, first: int) -> Leaves:
        """The leaves from this number on."""
        return Leaves(ticket, tuple(self.leaves[first : first + MOST_IN_ONE]))

    def blocks(self, ticket: int, leaves: Sequence[int]) -> Blocks:
        """Fingerprints of the blocks of these arrays, and what of them is not finite."""
        odd = [self._not_finite(number) for number in leaves]
        return Blocks(
            ticket, tuple(self._blocks[n] for n in leaves), tuple(n for n, _ in odd), tuple(n for _, n in odd)
        )

    def _not_finite(self, number: int) -> tuple[int, int]:
        array = self._arrays[number]
        nans = infs = 0
        if array is not None:
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
        found = compare(self._read(number, offset, length), theirs, leaf.dtype, leaf.itemsize)
        if leaf.dtype != FINGERPRINTS:
            return found
        return Difference(found.count, found.first)

    def _read(self, number: int, offset: int, length: int) -> Bytes:
        array = self._arrays[number]
        if array is None:
            raise LookupError(f"{self.leaves[number].path} has no elements")
        return array.read(offset, length)


def same_key(leaf: Leaf) -> tuple[Any, ...]:
    """Equal for leaves that do not differ. Of devices only the kind counts: each rank has one of its own."""
    return (
        leaf.path,
        leaf.kind,
        leaf.type,
        leaf.digest,
        leaf.dtype,
        leaf.shape,
        family(leaf.device),
        leaf.requires_grad,
        leaf.text if leaf.kind == "error" else "",
    )


def _encoded(part: Any) -> bytes:
    data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


def _plain_leaf(found: Found) -> Leaf:
    digest = fingerprint(found.content) if found.kind == "value" else b""
    return Leaf(found.path, found.kind, found.type, digest, text=found.text)


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
    )
