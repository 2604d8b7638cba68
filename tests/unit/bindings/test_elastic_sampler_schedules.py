"""Samplers of ranks that come, leave and are lost at random: no sample is lost, none counted twice that was committed."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.bindings import elastic_sampler as sampler_module
from hvdlab.bindings import elastic_state as handlers_module
from hvdlab.bindings.elastic_sampler import ElasticSampler
from hvdlab.bindings.elastic_state import SamplerStateHandler
from support.effort import examples


class _Asked(Exception):
    """A rank has come to an allgather, with this."""


class World:
    """Ranks in step, whose collectives are made one rank after the other.

    Attributes:
        seen: Samples that the model was trained with, by the last commit; those of padding count once.
        new: Those since.
    """

    def __init__(self, patch: pytest.MonkeyPatch, samples: int, size: int, batch: int) -> None:
        self._patch, self._samples, self._batch = patch, samples, batch
        self.ranks: list[SamplerStateHandler] = []
        self.number = 0
        self.seen: Counter[int] = Counter()
        self.new: Counter[int] = Counter()
        self.join(size)

    def _place(self, handler: SamplerStateHandler) -> None:
        self._patch.setattr(sampler_module, "rank", lambda: self.ranks.index(handler))
        self._patch.setattr(sampler_module, "size", lambda: len(self.ranks))

    def _together(self, method: str, root: SamplerStateHandler) -> None:
        """Call a method with collectives on all ranks: once for each rank's part, once with the answer."""
        state = copy.deepcopy(root.value.state_dict())
        self._patch.setattr(handlers_module, "broadcast_object", lambda obj, rank: copy.deepcopy(state))
        self._patch.setattr(SamplerStateHandler, "root_rank", 0)
        answers: list[object] = []
        for handler in self.ranks:
            self._patch.setattr(handlers_module, "allgather_object", _ask)
            with pytest.raises(_Asked) as asked:
                getattr(handler, method)()
            answers.append(asked.value.args[0])
        for handler in self.ranks:
            self._place(handler)
            self._patch.setattr(handlers_module, "allgather_object", lambda obj: copy.deepcopy(answers))
            getattr(handler, method)()

    def _begin_again(self) -> None:
        """Begin again as :func:`run_fn` does."""
        for handler in self.ranks:
            self._place(handler)
            handler.reset()
        self.number = 0

    def step(self) -> bool:
        """Run a batch on all ranks; return whether there was one."""
        batches = [handler.value.get_indices(self.number, self._batch) for handler in self.ranks]
        if not batches[0]:
            return False
        for handler in self.ranks:
            handler.value.record_batch(self.number, self._batch)
        self.new.update(set().union(*batches))
        self.number += 1
        return True

    def commit(self, only: int | None = None) -> None:
        """All save; or only one does, before a rank is lost."""
        for handler in self.ranks if only is None else [self.ranks[only % len(self.ranks)]]:
            handler.save()
        self.seen += self.new
        self.new.clear()

    def join(self, count: int) -> None:
        """Add ranks, at a commit."""
        old = list(self.ranks)
        for _ in range(count):
            self._patch.setattr(sampler_module, "rank", lambda: 0)
            self._patch.setattr(sampler_module, "size", lambda: 1)
            self.ranks.append(SamplerStateHandler(ElasticSampler(range(self._samples))))
        joined, self.ranks = self.ranks, old
        new, self.ranks = joined[len(old) :], joined
        for handler in old:
            self._place(handler)
            handler.reset()
        for handler in new:
            self._place(handler)
            handler.value.reset()
        self._together("sync", self.ranks[0])
        self.number = 0

    def cut_off(self, rank: int) -> SamplerStateHandler:
        """A rank is cut off, and the others go on without it. It has saved once more than they have."""
        lost = self.ranks[rank % len(self.ranks)]
        lost.save()
        self.lose(rank)
        return lost

    def come_back(self, handler: SamplerStateHandler) -> None:
        """Admit a rank that was cut off, at a commit."""
        root, self.ranks = self.ranks[0], [*self.ranks, handler]
        self._place(handler)
        handler.restore()
        self._begin_again()
        handler.overtaken()
        self._together("sync", root)

    def leave(self, rank: int) -> None:
        """Release a rank, at a commit."""
        self._together("hand_over", self.ranks[0])
        del self.ranks[rank % len(self.ranks)]
        self._begin_again()
        self._together("sync", self.ranks[0])

    def lose(self, rank: int) -> None:
        """Lose a rank, anywhere. The others go back."""
        del self.ranks[rank % len(self.ranks)]
        for handler in self.ranks:
            self._place(handler)
            handler.restore()
        self.new.clear()
        self._begin_again()
        self._together("sync", max(self.ranks, key=lambda handler: handler._saves))


def _ask(obj: object) -> object:
    raise _Asked(obj)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


def check(world: World, samples: int, peak: int) -> None:
    """Check that no sample is counted twice before all are; then those are with which the last batches are filled
    up."""
    again = world.seen - Counter(range(samples))
    assert set(world.seen) <= set(range(samples))
    if len(world.seen) < samples:
        assert not again
    assert sum(again.values()) < peak


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("step", "step", "commit")), st.just(0)),
        st.tuples(st.sampled_from(("lose", "torn", "cut off")), st.integers(0, 7)),
        st.tuples(st.just("come back"), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("join"), st.integers(1, 2)),
    ),
    max_size=25,
)


@settings(max_examples=examples(300), deadline=None)
@given(schedule=STEPS, samples=st.integers(0, 60), size=st.integers(1, 5), batch=st.integers(1, 4))
def test_no_sample_is_lost_and_none_committed_twice(
    patch: pytest.MonkeyPatch, schedule: Sequence[tuple[str, int]], samples: int, size: int, batch: int
) -> None:
    world = World(patch, samples, size, batch)
    peak = size
    away: list[SamplerStateHandler] = []
    for what, number in schedule:
        match what:
            case "cut off" if len(world.ranks) > 1:
                away.append(world.cut_off(number))
            case "come back" if away:
                world.commit()
                world.come_back(away.pop())
            case "step":
                world.step()
            case "commit":
                world.commit()
            case "join" if len(world.ranks) + number <= 6:
                world.commit()
                world.join(number)
            case "leave" if len(world.ranks) > 1:
                world.commit()
                world.leave(number)
            case "lose" if len(world.ranks) > 1:
                world.lose(number)
            case "torn" if len(world.ranks) > 1:
                # One had saved when another was lost: that one's state is gone on from, unless it is the lost one.
                others, gone = world.ranks, number % len(world.ranks)
                ahead = (gone + 1) % len(others)
                world.commit(ahead)
                world.lose(gone)
        peak = max(peak, len(world.ranks))
        check(world, samples, peak)
    while world.step():
        pass
    world.commit()
    assert set(world.seen) == set(range(samples))
    check(world, samples, peak)


def test_what_only_a_rank_that_was_cut_off_has_committed_is_processed_again(
    patch: pytest.MonkeyPatch,
) -> None:
    """No other has trained with it: the others went back when they had lost that rank."""
    world = World(patch, 24, 3, 2)
    world.step()
    world.commit()
    world.step()
    lost = world.cut_off(1)
    assert lost.value.processed_indices - set(world.seen)
    world.step()
    world.commit()
    world.come_back(lost)
    assert all(handler.value.processed_indices == set(world.seen) for handler in world.ranks)
    while world.step():
        pass
    world.commit()
    assert set(world.seen) == set(range(24))
