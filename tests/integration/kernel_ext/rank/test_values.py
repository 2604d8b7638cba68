"""Values of cells, pushed and pulled variables."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]  # has no types
import pytest

from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.rank import values
from hvdlab.kernel_ext.rank.values import OutgoingTransfers, short_repr
from hvdlab.kernel_ext.wire.pickling import TooLarge, dump, dump_parts
from hvdlab.kernel_ext.wire.values import (
    Acked,
    PullValue,
    PushValue,
    ReadChunk,
    ReleaseTransfer,
    SharedBufferReader,
    Snapshot,
    TransferChunk,
    Value,
    WriteChunk,
)
from support.patience import PATIENCE

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank


def load(raw: bytes | None) -> Any:
    assert raw is not None
    return pickle.loads(raw)  # noqa: S301  # made by the test


def test_a_cells_value_is_sent(rank: Rank) -> None:
    assert load(rank.run("{'a': [1, 2]}").done.value) == {"a": [1, 2]}


def test_functions_and_classes_of_a_cell_are_sent(rank: Rank) -> None:
    assert load(rank.run("k = 3\nlambda x: x * k").done.value)(5) == 15


def test_no_value_is_pickled_if_none_is_wanted(rank: Rank) -> None:
    done = rank.run("[1]", want_value=False).done
    assert (done.has_value, done.value, done.value_repr) == (True, None, "[1]")


def test_a_large_value_stays_and_says_so(rank: Rank) -> None:
    done = rank.run("'x' * 100_000", value_limit=1000).done
    assert done.value is None
    assert "larger than 1,000 bytes" in done.value_note
    assert done.too_large
    shown = repr(CellResults([0], {0: done}))
    assert shown.endswith("`%hvd_pull NAME` brings it"), shown[-200:]
    assert "has all" not in shown
    assert rank.run("len(_)").done.value_repr == "100000"


def test_what_cannot_be_pickled_stays_and_says_so(rank: Rank) -> None:
    done = rank.run("import threading\nthreading.Lock()").done
    assert done.value is None
    assert "can't be pickled" in done.value_note
    assert not done.too_large
    assert "lock" in done.value_repr
    assert done.error is None


def test_a_value_that_raises_when_pickled_does_not_fail_the_cell(rank: Rank) -> None:
    done = rank.run("class Bad:\n    def __reduce__(self): raise SystemError('no')\nBad()").done
    assert done.error is None
    assert "SystemError: no" in done.value_note


def test_pickling_stops_at_the_limit() -> None:
    class Endless:
        def __reduce__(self) -> Any:
            return list, (), None, iter(lambda: "x" * 1000, None)

    with pytest.raises(TooLarge):
        dump(Endless(), 1 << 20)


def test_a_view_does_not_carry_the_whole_tensor() -> None:
    torch = pytest.importorskip("torch")
    row = torch.zeros(1000, 1000)[3]
    raw = dump({"row": row}, 1 << 16)
    assert torch.equal(load(raw)["row"], row)


def test_tensors_keep_what_they_are() -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.arange(4.0, requires_grad=True)
    product = leaf * 2
    parameter = torch.nn.Parameter(torch.ones(2))
    got = load(dump([leaf, product, parameter, leaf[1:3], torch.eye(2).to_sparse()]))
    assert got[0].requires_grad
    assert torch.equal(got[1], product.detach())
    assert isinstance(got[2], torch.nn.Parameter)
    assert torch.equal(got[3], leaf[1:3].detach())
    assert got[4].is_sparse


def test_tensors_come_to_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    got = load(dump([torch.ones(3, device="cuda"), torch.nn.Linear(2, 2).cuda()]))
    assert got[0].device.type == "cpu"
    assert next(got[1].parameters()).device.type == "cpu"


def test_short_repr_never_raises() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "RuntimeError" in short_repr(Bad())
    assert len(short_repr("x" * 100_000)) < 5000


def test_pushed_values_are_variables(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        done = pool.ask(PushValue(7, ("x", "f"), (pickle.dumps([1, 2]), cloudpickle.dumps(lambda: 3))), Acked)
        assert done == Acked(7)
        assert pool.run("x, f()").done.value_repr == "([1, 2], 3)"

    rank.play(script)


def test_a_push_binds_all_or_nothing(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        done = pool.ask(PushValue(8, ("good", "bad"), (pickle.dumps(1), b"no pickle")), Acked)
        assert "UnpicklingError" in done.error
        assert pool.run("good").done.error is not None

    rank.play(script)


def test_pulled_values_come_by_name(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.run("import threading\nx = 3\nlock = threading.Lock()")
        value = pool.ask(PullValue(9, ("x", "x * 2", "lock", "missing", "1 +", "exit()")), Value)
        assert value.ticket == 9
        assert load(value.pickles[0]) == 3
        assert load(value.pickles[1]) == 6
        assert value.pickles[2:] == (None, None, None, None)
        assert value.errors[:2] == ("", "")
        assert "TypeError" in value.errors[2]
        assert "NameError" in value.errors[3]
        assert "SyntaxError" in value.errors[4]
        assert "SystemExit" in value.errors[5]

    rank.play(script)


def test_pulled_expression_of_small_value_is_evaluated_once(rank: Rank) -> None:
    rank.run("numbers = iter(range(10))")

    def script(pool: Pool) -> None:
        assert load(pool.ask(PullValue(1, ("next(numbers)",)), Value).pickles[0]) == 0
        assert load(pool.ask(PullValue(2, ("next(numbers)",)), Value).pickles[0]) == 1

    rank.play(script)


def answer_to(ticket: int, pool: Pool) -> Value:
    while (value := pool.expect(Value)).ticket != ticket:
        pass
    return value


def test_request_repeated_as_it_leaves_the_queue_is_done_once(rank: Rank) -> None:
    rank.run("numbers = iter(range(10))")
    request = PullValue(1, ("next(numbers)",))
    repeated = [request]

    class Jobs(deque[Any]):
        def popleft(self) -> Any:
            job = super().popleft()
            if repeated:
                rank.engine.mail(repeated.pop())
                rank.engine.settle()
            return job

    rank.agent._jobs = Jobs()

    def script(pool: Pool) -> None:
        pool.ask(request, Value)
        pool.engine.mail(PullValue(2, ("next(numbers)",)))
        assert load(answer_to(2, pool).pickles[0]) == 1

    rank.play(script)


def test_request_repeated_as_its_work_begins_is_done_once(rank: Rank) -> None:
    rank.run("import threading\nnumbers, begun, go = iter(range(10)), threading.Event(), threading.Event()")
    names = rank.shell.user_ns
    request = PullValue(1, ("(begun.set(), go.wait(), next(numbers))[-1]",))
    looked_at = threading.Event()

    class Jobs(deque[Any]):
        def __iter__(self) -> Iterator[Any]:
            if request in tuple(super().__iter__()):
                looked_at.set()
                assert names["begun"].wait(PATIENCE)
            return super().__iter__()

        def popleft(self) -> Any:
            if self[0] == request:
                assert looked_at.wait(PATIENCE)
            return super().popleft()

    rank.agent._jobs = Jobs()

    def script(pool: Pool) -> None:
        for _ in range(2):
            pool.engine.mail(request)
        pool.engine.settle()
        names["go"].set()
        pool.engine.mail(PullValue(2, ("next(numbers)",)))
        assert load(answer_to(2, pool).pickles[0]) == 1

    rank.play(script)


def test_pull_repeated_after_its_answer_gets_the_same_value(rank: Rank) -> None:
    rank.run("numbers = iter(range(10))")

    def script(pool: Pool) -> None:
        value = pool.ask(PullValue(1, ("next(numbers)",)), Value)
        assert pool.ask(PullValue(1, ("next(numbers)",)), Value) == value
        assert load(pool.ask(PullValue(2, ("next(numbers)",)), Value).pickles[0]) == 1

    rank.play(script)


def test_push_repeated_after_its_answer_is_answered_the_same(rank: Rank) -> None:
    parts = dump_parts((7,))
    sizes = tuple(part.nbytes for part in parts)

    def script(pool: Pool) -> None:
        for number, part in enumerate(parts):
            assert pool.ask(WriteChunk(number, 1, sizes, number, 0, bytes(part)), Acked).error == ""
        for _ in range(2):
            assert pool.ask(PushValue(50, ("x",), (), 1), Acked) == Acked(50)
        assert pool.run("x").done.value_repr == "7"

    rank.play(script)


def test_values_wait_for_the_cell(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.start("import time; x = 1; time.sleep(0.01); x = 2")
        value = pool.ask(PullValue(1, ("x",)), Value)
        assert load(value.pickles[0]) == 2

    rank.play(script)


# -- values in pieces -------------------------------------------------------------------------------------------------


def test_large_arrays_stay_where_they_are_until_they_are_fetched(rank: Rank) -> None:
    rank.run("import numpy as np\nx = np.arange(1_000_000)\nbefore = x.ctypes.data")

    def script(pool: Pool) -> None:
        value = pool.ask(PullValue(5, ("x",)), Value)
        assert (value.pickles, value.errors) == ((None,), ("",))
        assert value.sizes[1:] == (8_000_000,)
        # The same question again, as after the loss of a coordinator, gets the same answer.
        assert pool.ask(PullValue(5, ("x",)), Value) == value
        pool.engine.mail(PullValue(6, ("1 + 1",)))
        parts = [bytearray(size) for size in value.sizes]
        ticket = 100
        for number, part in enumerate(parts):
            for offset in range(0, len(part), 3_000_000):
                ticket += 1
                piece = pool.ask(ReadChunk(ticket, 5, number, offset, 3_000_000), TransferChunk)
                assert piece.data is not None
                part[offset : offset + len(piece.data)] = piece.data
        pool.engine.mail(ReleaseTransfer(5))
        # Questions from that time are answered now, and not before.
        assert load(pool.ask(PullValue(7, ("1 + 2",)), Value).pickles[0]) == 2
        loaded = pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # made by the test
        assert loaded.flags.writeable
        assert loaded[-1] == 999_999
        assert pool.ask(ReadChunk(99, 5, 0, 0, 10), TransferChunk).data is None

    rank.play(script)


def test_a_value_that_nobody_fetches_is_kept_for_a_while_only(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PATIENCE", 0.05)
    rank.run("x = b'x' * 5_000_000")

    def script(pool: Pool) -> None:
        assert pool.ask(PullValue(5, ("x",)), Value).sizes
        assert load(pool.ask(PullValue(6, ("len(x)",)), Value).pickles[0]) == 5_000_000

    rank.play(script)


def test_a_pull_that_is_given_up_while_a_cell_runs_does_not_hold_the_rank(rank: Rank) -> None:
    rank.run("import threading\nx = b'x' * 5_000_000\nbegun, go = threading.Event(), threading.Event()")

    def script(pool: Pool) -> None:
        names = rank.shell.user_ns
        cell = pool.start("begun.set(); go.wait()")
        assert names["begun"].wait(PATIENCE)
        pool.engine.mail(PullValue(5, ("x",)))
        pool.engine.mail(ReleaseTransfer(5))
        pool.engine.settle()
        names["go"].set()
        pool.finish(cell)
        assert load(pool.ask(PullValue(6, ("len(x)",)), Value).pickles[0]) == 5_000_000

    rank.play(script)


def test_a_pull_that_is_given_up_while_the_value_is_made_does_not_hold_the_rank(rank: Rank) -> None:
    rank.run(
        "import threading\nbegun, go = threading.Event(), threading.Event()\n"
        "def make():\n    begun.set()\n    go.wait()\n    return b'x' * 5_000_000"
    )

    def script(pool: Pool) -> None:
        names = rank.shell.user_ns
        pool.engine.mail(PullValue(5, ("make()",)))
        assert names["begun"].wait(PATIENCE)
        pool.engine.mail(ReleaseTransfer(5))
        pool.engine.settle()
        names["go"].set()
        assert load(pool.ask(PullValue(6, ("1 + 1",)), Value).pickles[0]) == 2

    rank.play(script)


def test_chunk_of_a_snapshot_outlives_a_pull_beside_it(rank: Rank) -> None:
    transfers = OutgoingTransfers(rank.loop)
    transfers.offer_while_running(Snapshot(1, (5,)), [memoryview(b"known")])
    known = transfers.read(ReadChunk(11, 1, 0, 0, 5, share=True)).shared
    transfers.offer(Value(2, (None,), ("",), (5,)), [memoryview(b"value")])
    value = transfers.read(ReadChunk(12, 2, 0, 0, 5, share=True)).shared
    assert known is not None
    assert value is not None
    target = bytearray(5)
    with SharedBufferReader() as reader:
        reader.read(value, memoryview(target))
        assert target == b"value"
        transfers.release(2)
        rank.loop.run_until_complete(transfers.released(2))
        reader.read(known, memoryview(target))
        assert target == b"known"
    transfers.release(1)


def test_a_transfer_is_released_by_the_control_thread_after_the_end_of_the_ranks_loop() -> None:
    loop = asyncio.new_event_loop()
    transfers = OutgoingTransfers(loop)
    transfers.offer(Value(2, (None,), ("",), (5,)), [memoryview(b"value")])
    loop.close()
    transfers.release(2)
    transfers.release_all()


def test_a_large_value_is_brought_in_pieces(rank: Rank) -> None:
    numpy = pytest.importorskip("numpy")
    parts = dump_parts((numpy.arange(1000 * 1000), "small"))
    sizes = tuple(part.nbytes for part in parts)

    def script(pool: Pool) -> None:
        ticket = 0
        for number, part in enumerate(parts):
            for offset in range(0, part.nbytes, 3_000_000):
                ticket += 1
                piece = bytes(part[offset : offset + 3_000_000])
                assert pool.ask(WriteChunk(ticket, 1, sizes, number, offset, piece), Acked).error == ""
        assert pool.ask(PushValue(50, ("big", "other"), (), 1), Acked).error == ""
        assert "KeyError" in pool.ask(PushValue(51, ("big", "other"), (), 1), Acked).error
        assert (
            pool.run("(int(big.sum()), other, big.flags.writeable)").done.value_repr
            == "(499999500000, 'small', True)"
        )

    rank.play(script)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "int64", "float8_e4m3fn"])
def test_large_tensors_are_parts_of_their_own(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(300_000).reshape(3, -1).to(getattr(torch, dtype))[:, ::2]
    stream, *buffers = dump_parts({"weights": tensor})
    assert [buffer.nbytes for buffer in buffers] == [tensor.numel() * tensor.element_size()]
    assert len(stream) < 2000
    loaded = pickle.loads(stream, buffers=[bytearray(buffer) for buffer in buffers])["weights"]  # noqa: S301
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_models_keep_their_parameters() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(300, 300)
    stream, *buffers = dump_parts(model)
    loaded = pickle.loads(stream, buffers=[bytearray(buffer) for buffer in buffers])  # noqa: S301
    assert isinstance(loaded.weight, torch.nn.Parameter)
    assert torch.equal(loaded.weight, model.weight)
    assert len(buffers) == 1


def test_large_arrays_are_not_even_copied_when_they_are_too_large() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")

    for value in (numpy.zeros(1 << 30, numpy.uint8), torch.empty(1 << 30, dtype=torch.uint8)):
        with pytest.raises(TooLarge):
            dump([value], 1 << 20)


def test_of_a_very_long_text_only_the_beginning_is_formatted(rank: Rank) -> None:
    ran = rank.run("x = 'ab' * 2_000_000\nx")
    assert ran.done.value_repr == f"{('ab' * 500)!r}… (4,000,000 characters in all)"
    assert "b'\\x00" in rank.run("bytes(5_000_000)").done.value_repr
