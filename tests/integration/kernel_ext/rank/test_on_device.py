"""Arrays compared where they are: with the same result as by their bytes, for all types, layouts and values.

Tensors of the host stand for those of a GPU, by the same code; ``tests/gpu/test_diff.py`` has real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.bindings import fingerprints
from hvdlab.bindings.fingerprints import SIZE, differing
from hvdlab.bindings.framework_hooks import ArraySource
from hvdlab.bindings.framework_hooks import torch as hooks
from hvdlab.kernel_ext.notebook.variables.diff import Diff, diff
from hvdlab.kernel_ext.rank.compare import ComparedValue
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.compare import AskBlocks, AskLeaves, Compare, Compared, Gather, OpenComparison
from hvdlab.kernel_ext.wire.values import TransferChunk

BLOCK = 64
"""Bytes of a block here, in four rows of four words."""
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
REAL = hooks._of_tensor


@contextmanager
def small_blocks(on_device: Callable[[], bool], named: Callable[[], bool] | None = None) -> Iterator[None]:
    """Blocks of 64 bytes; tensors are worked on where they are if ``on_device()``, and claim to be on a GPU if
    ``named()``."""

    def of_tensor(tensor: Any) -> ArraySource | None:
        source = REAL(tensor)
        if source is None or named is None or not named():
            return source
        return replace(source, device="cuda:0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "BLOCK", BLOCK)
        patch.setattr(fingerprints, "ROWS", 4)
        patch.setattr(fingerprints, "COLUMNS", 4)
        patch.setattr(fingerprints, "LEAST", 1)
        patch.setattr(hooks, "_works_on", lambda device: on_device())
        patch.setattr(hooks, "_of_tensor", of_tensor)
        yield


def tensor_of(data: bytes, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return a tensor with these bytes."""
    raw = torch.tensor(list(data), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw & 1
    if layout == "odd place":  # a word of the block lies across two of the memory's
        size = torch.empty(0, dtype=dtype).element_size()
        shifted = torch.zeros(raw.numel() + size, dtype=torch.uint8)
        shifted[size:] = raw
        return shifted.view(dtype)[1:]
    found = raw.view(dtype)
    if layout == "transposed":
        rows = 1 if found.numel() % 2 else 2
        return found.reshape(rows, -1).t().contiguous().t()
    return found.conj() if layout == "conjugated" and dtype.is_complex else found


def source(tensor: torch.Tensor) -> ArraySource:
    found = hooks.HOOKS.array(tensor)
    assert found is not None
    return found


def made_on_device(tensor: torch.Tensor) -> bytes:
    """Return the fingerprints of a tensor's blocks."""
    with small_blocks(lambda: True):
        found = source(tensor)
        assert found.on_device is not None
        return found.fingerprints()


changes = st.lists(
    st.tuples(st.integers(0, 255), st.sampled_from([0x01, 0x40, 0x80, 0xFF])), min_size=0, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=256, max_size=256),
    units=st.integers(1, 16),
    changed=changes,
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(["plain", "odd place", "transposed", "conjugated"])] * 2),
)
def test_the_same_blocks_differ_as_by_their_bytes(
    data: bytes,
    units: int,
    changed: list[tuple[int, int]],
    dtype: torch.dtype,
    layouts: tuple[str, str],
) -> None:
    mine = bytearray(data[: 16 * units])
    theirs = bytearray(mine)
    for place, bits in changed:
        theirs[place % len(theirs)] ^= bits
    first = tensor_of(bytes(mine), dtype, layouts[0])
    second = tensor_of(bytes(theirs), dtype, layouts[1])
    with small_blocks(lambda: False):
        host = [source(one).fingerprints() for one in (first, second)]
    with small_blocks(lambda: True):
        device = [source(one).fingerprints() for one in (first, second)]
    assert [len(one) for one in device] == [len(one) for one in host] == [SIZE * -(-units // 4)] * 2
    assert differing(*device) == differing(*host)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_all_kinds_are_counted_as_on_the_host(dtype: torch.dtype) -> None:
    """Every pattern of 16 bits, in each place of an element that is larger: NaNs of all kinds, infinities, numbers below the least normal one, -0.0."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8).reshape(-1, 2)
    size = torch.empty(0, dtype=dtype).element_size()
    if size > 2:
        patterns = torch.cat((patterns, patterns.flip(0)) * (size // 4), 1)
    raw = patterns.contiguous().reshape(-1)
    tensor = (raw & 1).view(dtype) if dtype is torch.bool else raw.view(dtype)
    if dtype.is_floating_point and size > 1:
        infinite = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=dtype)
        tensor = torch.cat((tensor, infinite))
    with_host = ComparedValue([tensor])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "_works_on", lambda device: True)
        patch.setattr(fingerprints, "LEAST", 1)
        on_device = ComparedValue([tensor])
    leaf = next(number for number, one in enumerate(on_device.leaves) if one.kind == "array")
    assert on_device.leaves[leaf].on_device
    ours, theirs = on_device.blocks(1, [leaf]), with_host.blocks(1, [leaf])
    assert (ours.nans, ours.infs) == (theirs.nans, theirs.infs)
    if dtype.is_floating_point and size > 1:
        assert ours.nans[0] > 0
        assert ours.infs[0] > 0


def test_signs_differ_wherever_they_are_and_however_many() -> None:
    """Changes of the highest bit are those that sums of products could miss: each adds half of the sums' modulus."""
    zeros = torch.zeros(4 * BLOCK // 8, dtype=torch.float64)
    seen = {made_on_device(zeros)}
    for places in ([0], [0, 1], [0, 8], [7, 8], [3, 4, 5, 6], list(range(32))):
        changed = zeros.clone()
        changed[places] = -0.0
        seen.add(made_on_device(changed))
    assert len(seen) == 7


def test_elements_that_change_places_are_a_difference() -> None:
    mine, theirs = torch.arange(64.0), torch.arange(64.0)
    theirs[[3, 40]] = theirs[[40, 3]]
    assert differing(made_on_device(mine), made_on_device(theirs)) == [0, 2]


def test_a_device_without_memory_has_the_host_work_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_blocks(lambda: True):
        side = source(torch.arange(100.0)).on_device
        assert side is not None
        before = side.fingerprints(), side.not_finite()
        tried: list[Any] = []
        for name in ("_sums", "_odd"):
            real = getattr(side, name)

            def scarce(device: Any, real: Callable[[Any], Any] = real) -> Any:
                tried.append(device)
                if len(tried) % 2:
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory")
                return real(device)

            monkeypatch.setattr(side, name, scarce)
        assert (side.fingerprints(), side.not_finite()) == before
    assert len(tried) == 4


# -- whole comparisons ------------------------------------------------------------------------------------------------


class RanksHere:
    """Ranks whose examinations are in this process, in place of a pool's questions; those of ``gpus`` have their tensors on a GPU."""

    def __init__(self, values: Sequence[Any], gpus: set[int]) -> None:
        self._values, self._gpus = values, gpus
        self._open: dict[int, ComparedValue] = {}
        self._tickets = 0
        self.rank = 0
        self.read_on_host: list[AskBlocks] = []

    @property
    def on_gpu(self) -> bool:
        return self.rank in self._gpus

    def ask(
        self, make: Callable[[int], Payload], ranks: Sequence[int], deadline: object
    ) -> Mapping[int, Any]:
        self._tickets += 1
        question = make(self._tickets)
        return {rank: self._answer(rank, question) for rank in ranks}

    def send(self, message: Payload, ranks: Sequence[int]) -> None: ...

    def _answer(self, rank: int, question: Any) -> Any:
        self.rank = rank
        if isinstance(question, OpenComparison):
            self._open[rank] = ComparedValue(self._values[rank])
            return self._open[rank].examined(question.ticket)
        mine = self._open[rank]
        if isinstance(question, AskLeaves):
            return mine.some_leaves(question.ticket, question.first)
        if isinstance(question, AskBlocks):
            if question.on_host:
                self.read_on_host.append(question)
            return mine.blocks(question.ticket, question.leaves.get(rank, ()), question.on_host)
        if isinstance(question, Gather):
            data = bytearray(sum(length for _, _, length in question.ranges))
            mine.gather(question.ranges, memoryview(data))
            return TransferChunk(question.ticket, bytes(data))
        assert isinstance(question, Compare)
        return Compared(question.ticket, mine.compare(question.ranges.get(rank, ()), question.data))


def compared(values: Sequence[Any], gpus: set[int], on_device: bool) -> tuple[Diff, RanksHere]:
    ranks = RanksHere(values, gpus)
    with small_blocks(lambda: on_device and ranks.on_gpu, lambda: ranks.on_gpu):
        return diff(ranks, "x", range(len(values))), ranks  # type: ignore[arg-type]  # has the called methods


def shown(found: Diff) -> tuple[Any, ...]:
    """Return all that a user sees, apart from the fingerprints."""
    rows = [
        (row.path, row.ranks, row.reference, row.what, row.first, row.count, row.largest, row.relative, row.not_finite, row.expected_not_finite)
        for row in found.rows
    ]  # fmt: skip
    return repr(found), [group.ranks for group in found.groups], rows


def nearly(*changed: tuple[int, float]) -> dict[str, torch.Tensor]:
    weight = torch.linspace(-1, 1, 70)
    for place, value in changed:
        weight[place] = value
    return {"weight": weight, "bias": torch.zeros(9, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    "values",
    [
        [nearly(), nearly()],
        [nearly(), nearly((69, -0.0)), nearly((0, float("nan")))],
        [nearly((3, float("inf"))), nearly((3, float("nan"))), nearly((3, float("nan")))],
        [nearly(), {**nearly(), "bias": torch.zeros(9)}],
        [nearly(), {"weight": torch.zeros(71)}],
    ],
    ids=["alike", "values", "not finite", "dtype", "missing"],
)
@pytest.mark.parametrize("gpus", [{0, 1, 2}, {1}, {0, 2}, {0}], ids=str)
def test_a_comparison_shows_the_same_wherever_it_is_made(values: list[Any], gpus: set[int]) -> None:
    by_bytes, _ = compared(values, gpus, on_device=False)
    found, ranks = compared(values, gpus, on_device=True)
    assert shown(found) == shown(by_bytes)
    mixed = bool(gpus & set(range(len(values)))) and not set(range(len(values))) <= gpus
    assert bool(ranks.read_on_host) == mixed


def test_nothing_is_read_of_what_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(offset: int, length: int) -> Any:
        raise AssertionError("the elements were to stay where they are")

    with small_blocks(lambda: True):
        whole = source(torch.arange(100.0))
        away = replace(whole, read=read)
        monkeypatch.setattr(hooks, "_of_tensor", lambda tensor: away)
        one, other = (ComparedValue({"w": torch.arange(100.0)}).examined(1) for _ in range(2))
    assert one.digest == other.digest
    assert one.nbytes == 400
