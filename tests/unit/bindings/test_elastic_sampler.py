"""Division of the remaining samples by an elastic sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.bindings import elastic_sampler as module
from hvdlab.bindings.elastic_sampler import ElasticSampler
from hvdlab.bindings.elastic_state import SamplerStateHandler
from hvdlab.collectives.errors import NotInitializedError
from support.effort import examples

Place = Callable[[int, int], None]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return where the sampler takes itself to be."""

    def put(rank: int, size: int) -> None:
        monkeypatch.setattr(module, "rank", lambda: rank)
        monkeypatch.setattr(module, "size", lambda: size)

    return put


def samplers(place: Place, size: int, count: int, **arguments: object) -> list[ElasticSampler]:
    found = []
    for rank in range(size):
        place(rank, size)
        found.append(ElasticSampler(range(count), **arguments))  # type: ignore[arg-type]  # of the tests
    return found


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 9), st.integers(0, 40), st.booleans(), st.sets(st.integers(0, 39)))
def test_all_get_equally_many_and_nothing_is_left_out(
    size: int, count: int, shuffle: bool, processed: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def put(rank: int, size: int) -> None:
            patch.setattr(module, "rank", lambda: rank)
            patch.setattr(module, "size", lambda: size)

        state = {"epoch": 3, "processed_indices": processed}
        parts = []
        for rank in range(size):
            put(rank, size)
            sampler = ElasticSampler(range(count), shuffle=shuffle)
            sampler.load_state_dict(state)
            parts.append(list(sampler))
            assert len(parts[-1]) == len(sampler) == sampler.num_samples
            assert sampler.total_size == size * len(sampler)
    left = set(range(count)) - processed
    counts = Counter(index for part in parts for index in part)
    assert set(counts) == left
    assert sum(counts.values()) < len(left) + size
    assert not left or max(counts.values()) - min(counts.values()) <= 1 or len(left) < size


def test_without_shuffling_ranks_take_turns(place: Place) -> None:
    first, second = samplers(place, 2, 7, shuffle=False)
    assert list(first) == [0, 2, 4, 6]
    assert list(second) == [1, 3, 5, 0]


def test_the_order_depends_on_seed_and_epoch_alone(place: Place) -> None:
    place(0, 2)
    orders: dict[tuple[int, int], list[int]] = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for _ in range(2):
            sampler = ElasticSampler(range(100), seed=seed)
            sampler.set_epoch(epoch)
            assert orders.setdefault((seed, epoch), list(sampler)) == list(sampler)
    assert orders[0, 0] != orders[0, 1]
    assert orders[0, 0] != orders[1, 0]


def test_batches_that_are_recorded_are_not_given_out_again(place: Place) -> None:
    place(0, 2)
    sampler = ElasticSampler(range(20))
    order = list(sampler)
    sampler.record_batch(0, 3)
    sampler.record_batch(3, 3)
    assert sampler.get_indices(3, 3) == order[9:]
    assert sampler.processed_indices == {*order[:3], *order[9:]}
    assert list(sampler) == order  # until it is reset
    sampler.reset()
    assert set(sampler).isdisjoint(sampler.processed_indices)
    assert len(sampler) == 6  # the other rank has processed its four samples of these batches as well


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_that_reset_after_equal_batches_divide_the_rest(place: Place, shuffle: bool) -> None:
    pair = samplers(place, 2, 10, shuffle=shuffle)
    for _ in range(2):  # the second time, batches of before the first reset still count
        given: set[int] = set()
        for rank, sampler in enumerate(pair):
            place(rank, 2)
            sampler.record_batch(0, 2)
            given |= sampler.processed_indices
            sampler.reset()
        for sampler in pair:
            assert set(sampler.remaining_indices) == set(range(10)) - given
        assert pair[0].remaining_indices == pair[1].remaining_indices
        assert set(pair[0]).isdisjoint(pair[1])
    for sampler in pair:
        sampler.set_epoch(1)
        assert len(sampler.remaining_indices) == 10


def test_fewer_ranks_divide_what_is_left(place: Place) -> None:
    first, second, third = samplers(place, 3, 24)
    for sampler in (first, second, third):
        iter(sampler)
        sampler.record_batch(0, 4)
    united = set().union(*(s.processed_indices for s in (first, second, third)))
    assert len(united) == 12
    for rank, sampler in enumerate((first, third)):
        place(rank, 2)
        sampler.load_state_dict({"epoch": 0, "processed_indices": united})
    assert len(first) == 6
    assert set(first) | set(third) == set(range(24)) - united
    assert set(first).isdisjoint(third)


def test_a_new_epoch_begins_with_everything(place: Place) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(5), shuffle=False)
    iter(sampler)
    sampler.record_batch(0, 5)
    sampler.reset()
    assert list(sampler) == []
    assert len(sampler) == 0
    sampler.set_epoch(1)
    assert sampler.processed_indices == set()
    assert sampler.epoch == 1
    assert list(sampler) == [0, 1, 2, 3, 4]


def test_its_state_is_a_copy(place: Place) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(5), shuffle=False)
    state = sampler.state_dict()
    assert state == {"epoch": 0, "processed_indices": set(), "processed_num": 0}
    sampler.record_indices([1, 2])
    assert state["processed_indices"] == set()
    state["processed_indices"].add(4)
    other = ElasticSampler(range(5), shuffle=False)
    other.load_state_dict(state)
    other.record_indices([0])
    assert state["processed_indices"] == {4}
    assert list(ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]
    other.reset()
    assert list(other) == [1, 2, 3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_checkpoint_of_one_rank_has_the_samples_of_all(place: Place, shuffle: bool) -> None:
    """Rank 0 saves, as scripts do, and all load it, perhaps more ranks than before."""
    pair = samplers(place, 2, 20, shuffle=shuffle)
    processed: set[int] = set()
    for rank, sampler in enumerate(pair):
        place(rank, 2)
        for _ in range(2):
            processed |= set(list(sampler)[:3])
            sampler.record_batch(0, 3)
            sampler.reset()
        processed |= set(list(sampler)[:2])
        sampler.record_batch(0, 2)
    checkpoint = pair[0].state_dict()
    assert len(processed) == 16
    place(2, 3)
    loaded = ElasticSampler(range(20), shuffle)
    loaded.load_state_dict(checkpoint)
    assert set(loaded.remaining_indices) == set(range(20)) - processed
    assert loaded.processed_num == 16


@pytest.mark.parametrize("shuffle", [False, True])
def test_how_many_were_processed(place: Place, shuffle: bool) -> None:
    place(0, 3)
    sampler = ElasticSampler(range(20), shuffle)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    assert sampler.processed_num == sampler.state_dict()["processed_num"] == 12
    others = {index for rank in (1, 2) for index in sampler.remaining_indices[rank:12:3]}
    state = {"epoch": 0, "processed_indices": sampler.processed_indices | others}
    place(1, 2)
    sampler.load_state_dict(state)
    assert sampler.processed_num == 12
    sampler.record_batch(0, 3)
    assert sampler.processed_num == 18
    sampler.record_batch(1, 3)
    assert sampler.processed_num == 20  # one was left of this batch
    sampler.set_epoch(1)
    assert sampler.processed_num == 0


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [16, 60])
def test_an_iteration_goes_on_with_its_own_batches_after_a_restore(
    place: Place, count: int, shuffle: bool
) -> None:
    for sampler in samplers(place, 2, count, shuffle=shuffle):
        place(sampler.rank, 2)
        saving = SamplerStateHandler(sampler)
        order = list(sampler)
        for number in range(2):
            sampler.record_batch(number, 2)
        saving.save()
        for number in (2, 3):
            sampler.record_batch(number, 2)
        saving.restore()
        assert sampler.processed_num == 8
        sampler.record_batch(2, 2)
        assert sampler.processed_num == 12
        assert sampler.get_indices(2, 2) == order[4:6]
        assert sampler.processed_indices == set(order[:6])


def test_the_next_iteration_after_a_restore_has_the_rest(place: Place) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(10), shuffle=False)
    saving = SamplerStateHandler(sampler)
    iter(sampler)
    sampler.record_batch(0, 4)
    saving.save()
    saving.restore()
    sampler.record_batch(1, 4)  # of the iteration that is at work
    assert list(sampler) == [4, 5, 6, 7, 8, 9]  # as of the restore
    sampler.record_batch(1, 2)
    assert sampler.processed_indices == set(range(8))
    sampler.reset()
    assert list(sampler) == [8, 9]


def test_what_all_ranks_have_processed_is_that_of_the_iteration_at_work(place: Place) -> None:
    first, second = samplers(place, 2, 20)
    orders = [list(sampler) for sampler in (first, second)]
    for rank, sampler in enumerate((first, second)):
        place(rank, 2)
        sampler.record_batch(0, 2)
        sampler.reset()
        sampler.record_batch(1, 2)
        share = sampler.share()
        assert share is not None
        assert share.of_all() == {*orders[0][2:4], *orders[1][2:4]}


def test_batches_of_two_iterations_are_no_share_of_one(place: Place) -> None:
    place(0, 2)
    sampler = ElasticSampler(range(20))
    iter(sampler)
    sampler.reset()
    sampler.record_batch(0, 2)  # of the iteration before
    iter(sampler)
    assert sampler.share() is None
    sampler.reset()
    iter(sampler)
    assert sampler.share() is not None


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_state_of_horovod_s_sampler(place: Place, shuffle: bool) -> None:
    place(0, 1)
    sampler = ElasticSampler(range(10), shuffle, seed=3)
    sampler.set_epoch(2)
    order = list(sampler)
    sampler.load_state_dict({"epoch": 2, "processed_num": 4})
    assert sampler.processed_indices == set(order[:4])
    assert sampler.processed_num == 4
    assert sorted(sampler) == sorted(order[4:])


def test_before_init_it_says_what_is_missing() -> None:
    with pytest.raises(NotInitializedError, match=r"hvd\.init"):
        ElasticSampler(range(3))
