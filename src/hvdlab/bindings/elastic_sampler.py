"""A sampler that knows which samples were processed, and divides the rest among the ranks that are there.

Rank numbers stay as they are when other ranks are lost, so the division goes by a rank's place among the living ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from hvdlab.collectives import context
from hvdlab.collectives.context import shown_number


@dataclass(frozen=True)
class Share:
    """Places of its share that a rank has processed since the samples were divided.

    Attributes:
        epoch: The epoch.
        replicas: Ranks among which they were divided.
        remaining: The samples, in the order in which the ranks took turns; the sampler's own list, which it never changes.
        places: The places.
    """

    epoch: int
    replicas: int
    remaining: list[int]
    places: frozenset[int]

    def of_all(self) -> set[int]:
        """Return the samples at these places of all ranks' shares."""
        turns = (place * self.replicas + rank for place in self.places for rank in range(self.replicas))
        return {self.remaining[turn % len(self.remaining)] for turn in turns}


class ElasticSampler:
    """Sampler that divides a dataset among the ranks, and the rest of it again when ranks come or go.

    Like torch's ``DistributedSampler``, with a record of the indices that were processed in this epoch. As part of an
    elastic state it unites these records when ranks begin again, so that committed samples are not processed twice, and
    none is left out. The samples that a lost rank had processed by the last commit are known from the others, as long as all
    ranks process their shares in step: the same batches, each recorded by ``record_batch``.

    Call :meth:`record_batch` after each batch, and :meth:`set_epoch` at the *end* of each epoch: it clears the record.

    Args:
        dataset: Anything with a length, which must not change.
        shuffle: Whether to shuffle the indices, differently in each epoch.
        seed: Of the shuffling; equal on all ranks.

    Attributes:
        epoch: The present epoch.
        processed_indices: Indices that were recorded in it.
        processed_num: About how many samples all ranks have processed in it.
        remaining_indices: The others as of the last :meth:`reset`, in the order in which the ranks take turns.
        num_replicas, rank: Ranks among which they are divided, and the position of this one.
        num_samples: How many of them each rank gets; a few are given twice so that all get equally many.
        total_size: ``num_samples`` of all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.indices: list[int] = []
        #: Whether an iteration has begun: then ``indices`` are its own until the next one begins.
        self._iterated = False
        #: The ranks that took turns, and the samples, when ``indices`` were cut.
        self._division: tuple[int, list[int]] = (0, [])
        #: Places in ``indices`` that were recorded since the last reset; ``None`` if indices were recorded otherwise.
        self._places: set[int] | None = set()
        #: Indices that the other ranks have processed by the last reset, if they work in step. They are not part of the record,
        #: which proves its indices to the ranks that it is united with.
        self._others: set[int] = set()
        #: At the last reset: how many indices this rank had a record of, and how many samples all ranks had processed.
        self._counts = (0, 0)
        self.reset()

    @property
    def processed_num(self) -> int:
        """Return the number of samples of this epoch that all ranks have processed, if each processed as many as this one since :meth:`reset`."""
        recorded, processed = self._counts
        own = len(self.processed_indices) - recorded
        return min(len(self.dataset), processed + own * self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it was processed yet. Call it when the one before has ended."""
        self.epoch = epoch
        self.processed_indices = set()
        self._others = set()
        self._divide(0)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that the batch of this number since iteration began was processed.

        After a :meth:`reset` it is still a batch of the iteration that is at work, until the next one begins.

        Args:
            batch_idx: Number of the batch.
            batch_size: Indices of a batch.
        """
        batch = self.get_indices(batch_idx, batch_size)
        self.processed_indices.update(batch)
        if self._places is not None:
            start = batch_idx * batch_size
            self._places.update(range(start, start + len(batch)))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that these indices were processed. Which ones another rank has processed meanwhile is not known then."""
        self.processed_indices.update(indices)
        self._places = None

    def share(self) -> Share | None:
        """Return the record since the last :meth:`reset`; ``None`` if indices were recorded otherwise than by batches."""
        if self._places is None:
            return None
        return Share(self.epoch, *self._division, frozenset(self._places))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of a batch of the iteration at work; the last may be smaller than ``batch_size``.

        Args:
            batch_idx: Number of the batch since iteration began.
            batch_size: Indices of a batch.
        """
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, perhaps another rank's, and :meth:`reset`.

        The state of Horovod's sampler is accepted as well: that one has ``processed_num`` in place of the indices, and
        processes an epoch in the order of its shuffled indices.
        """
        self.epoch = state_dict["epoch"]
        self._others = set()
        if "processed_indices" in state_dict:
            self.processed_indices = set(state_dict["processed_indices"])
        else:
            self.processed_indices = set(
                self._shuffled(range(len(self.dataset)))[: state_dict["processed_num"]]
            )
        self._divide(state_dict.get("processed_num", len(self.processed_indices)))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the samples that all ranks have processed in it, if they work in step.

        One rank's state is the checkpoint of all. Samples of other ranks are left out where this rank has called
        :meth:`record_indices` since the last :meth:`reset`.
        """
        share = self.share()
        in_step = set() if share is None else share.of_all()
        return {
            "epoch": self.epoch,
            "processed_indices": self.processed_indices | self._others | in_step,
            "processed_num": self.processed_num,
        }

    def reset(self) -> None:
        """Divide the samples that were not processed among the ranks that live now. A running iteration is not changed.

        Samples that were recorded by batches count as processed on all ranks, each of which has its share of every batch.
        """
        share = self.share()
        if share is not None:
            self._others |= share.of_all()
        self._divide(self.processed_num)

    def _divide(self, processed: int) -> None:
        """Divide the rest again, when all ranks have processed so many samples of this epoch."""
        self.num_replicas, self.rank = size(), rank()
        self._counts = (len(self.processed_indices), processed)
        self._places = set()
        done = self.processed_indices | self._others
        remaining = self._shuffled(i for i in range(len(self.dataset)) if i not in done)
        self.remaining_indices = remaining
        self.num_samples = math.ceil(len(remaining) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        if not self._iterated:
            self._cut()

    def _shuffled(self, indices: Iterable[int]) -> list[int]:
        """Return the indices in the order of this epoch: their own order without shuffling."""
        order = list(indices)
        if self.shuffle:
            # By a generator of its own: all ranks have to come to one order, whatever they have drawn from
            # the process's generator.
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def _cut(self) -> None:
        """Make ``indices`` this rank's share of the remaining samples."""
        padded = islice(cycle(self.remaining_indices), self.total_size)
        self.indices = list(islice(padded, self.rank, None, self.num_replicas))
        self._division = (self.num_replicas, self.remaining_indices)

    def __iter__(self) -> Iterator[int]:
        if self._places and self._division[1] is not self.remaining_indices:
            self._places = None  # those that were recorded are places in the indices of the iteration before
        self._iterated = True
        self._cut()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def rank() -> int:
    """Return the position of this rank among the living ones, from 0."""
    engine = context.engine("hvd.elastic")
    ranks = engine.ranks()
    return ranks.index(engine.rank) if engine.rank in ranks else engine.rank


def size() -> int:
    """Return the number of living ranks."""
    return context.engine("hvd.elastic").size


def first_rank() -> int:
    """Return the number of the first living rank, as scripts number them; 0 before ``hvd.init()``."""
    if not context.is_initialized():
        return 0
    engine = context.engine()
    return shown_number(next(iter(engine.ranks()), engine.rank))


def number_of(rank: int | None) -> int:
    """Return the number by which scripts know a rank of the core; of the first living rank for ``None``."""
    return first_rank() if rank is None else shown_number(rank)
