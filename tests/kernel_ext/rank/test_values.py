"""Values of cells, pushed and pulled variables."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from hvdlab.kernel_ext.payloads import Done, PullValue, PushValue, Value
from hvdlab.kernel_ext.rank.values import TooLarge, dump, short_repr

if TYPE_CHECKING:
    from tests.kernel_ext.rank.conftest import Pool, Rank


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
    assert rank.run("len(_)").done.value_repr == "100000"


def test_what_cannot_be_pickled_stays_and_says_so(rank: Rank) -> None:
    done = rank.run("import threading\nthreading.Lock()").done
    assert done.value is None
    assert "can't be pickled" in done.value_note
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
        done = pool.ask(PushValue(7, ("x", "f"), (pickle.dumps([1, 2]), cloudpickle.dumps(lambda: 3))), Done)
        assert done == Done(7)
        assert pool.run("x, f()").done.value_repr == "([1, 2], 3)"

    rank.play(script)


def test_a_push_binds_all_or_nothing(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        done = pool.ask(PushValue(8, ("good", "bad"), (pickle.dumps(1), b"no pickle")), Done)
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


def test_values_wait_for_the_cell(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.start("import time; x = 1; time.sleep(0.01); x = 2")
        value = pool.ask(PullValue(1, ("x",)), Value)
        assert load(value.pickles[0]) == 2

    rank.play(script)
