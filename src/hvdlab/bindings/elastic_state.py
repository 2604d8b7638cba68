"""Elastic states whose attributes are saved, restored and synchronized by handlers, and the registry that finds an object's handler."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvdlab.bindings.elastic_sampler import ElasticSampler, Share, number_of
from hvdlab.bindings.objects import allgather_object, broadcast_object
from hvdlab.collectives.basics import rank
from hvdlab.collectives.elastic.state import ATTEMPT, News, ObjectState, elect, merge_news

T = TypeVar("T")

logger = logging.getLogger("hvdlab.elastic")


class StateHandler(Generic[T]):
    """Handler that saves, restores and synchronizes an object that is more than a value.

    Args:
        value: The object.

    Attributes:
        value: The object.
        root: The rank whose state :meth:`sync` broadcasts, as the core numbers it; ``None`` for the first that lives.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.root: int | None = None

    def save(self) -> None:
        """Keep a copy of its state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give it the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give it the state of the root, and save that; all ranks call it alike."""
        raise NotImplementedError

    def hand_over(self) -> bool:
        """Hand state that only the leaving ranks have to the others; all ranks call it alike.

        Returns:
            Whether the object has to be synchronized after this.
        """
        return False

    def reset(self) -> None:
        """Prepare for training that begins again with other ranks."""

    def overtaken(self) -> None:
        """Drop state that only this rank has, since the others have begun again without it. :meth:`sync` follows."""

    def set_value(self, value: T) -> None:
        """Handle this object from now on."""
        self.value = value
        self.save()

    @property
    def root_rank(self) -> int:
        """Return the rank whose state :meth:`sync` broadcasts, as scripts number it now."""
        return number_of(self.root)


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """Handler of a sampler: its epoch, and the samples that all ranks together have processed in it."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        #: The sampler and its recorded places as of the last commit, and the number of commits.
        self._saved = self._state()
        self._share = sampler.share()
        self._saves = 0
        #: Whether training begins again: ranks can be lost, and with them records that only they have.
        self._again = False

    def _state(self) -> dict[str, Any]:
        """Return a copy of the sampler's state, with the samples of this rank alone: others count once a rank that lives proves them."""
        own = {"processed_indices": self.value.processed_indices}
        return copy.deepcopy({**self.value.state_dict(), **own})

    def save(self) -> None:
        self._saved = self._state()
        self._share = self.value.share()
        self._saves += 1
        self._again = False

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))
        self._again = True

    def hand_over(self) -> bool:
        """Unite the records of processed samples, as long as those of the leaving ranks exist."""
        mine = (self.value.epoch, self.value.processed_indices)
        every = allgather_object(mine)
        self.value.processed_indices = set().union(*(its for epoch, its in every if epoch == mine[0]))
        return True

    def overtaken(self) -> None:
        """Drop the record: the others go on from a state that need not have learnt from it, or have it already."""
        self.value.processed_indices = set()
        self._again = False

    def sync(self) -> None:
        state = broadcast_object(self._state(), self.root_rank)
        # A rank's samples of another epoch than the root's prove nothing about this one.
        mine = self.value.processed_indices if self.value.epoch == state["epoch"] else set()
        every = allgather_object(_Record(mine, self._share if self._again else None, self._saves))
        processed = set().union(*(its.processed for its in every)) | _of_lost(every, state["epoch"])
        self._saves = max(its.saves for its in every)
        merge_news = {"processed_indices": processed, "processed_num": len(processed)}
        self.value.load_state_dict({**state, **merge_news})
        self.save()

    def reset(self) -> None:
        if not self._again:  # no commit was restored: this rank's record by now counts
            self._share, self._again = self.value.share(), True
        self.value.reset()


@dataclass(frozen=True)
class _Record:
    """Record of the processed samples that one rank has.

    Attributes:
        processed: Those that it has a record of.
        share: The places that it had recorded at the point from which it begins again; ``None`` if it has just come, or has recorded
            indices otherwise than by batches.
        saves: How often it had saved by then.
    """

    processed: set[int]
    share: Share | None
    saves: int


def _of_lost(records: Sequence[_Record], epoch: int) -> set[int]:
    """Return the samples that lost ranks had processed by the last commit, if all ranks have worked in step; otherwise an empty set.

    The model of a rank that is ahead by a commit was trained with the samples that all others had processed for that commit, though
    their own records lack it.
    """
    survivors = [record for record in records if record.share is not None]
    if not survivors:
        return set()
    ahead = max(survivors, key=lambda record: record.saves)
    assert ahead.share is not None
    if ahead.share.epoch != epoch:
        return set()
    for record in survivors:
        share = record.share
        assert share is not None
        if (share.epoch, share.replicas, share.remaining) != (
            ahead.share.epoch,
            ahead.share.replicas,
            ahead.share.remaining,
        ):
            return set()
        behind = record.saves < ahead.saves and share.places <= ahead.share.places
        if share.places != ahead.share.places and not behind:
            return set()
    return ahead.share.of_all()


class LoadableStateHandler(StateHandler[Any]):
    """Handler of other objects with ``state_dict`` and ``load_state_dict``, such as a learning-rate scheduler."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: the object would go on to change the saved state, and a second failure would restore that.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        # A copy, since broadcast_object() returns the root its very argument, which would share objects with
        # the state that it is loaded into.
        self.value.load_state_dict(broadcast_object(copy.deepcopy(self.value.state_dict()), self.root_rank))
        self.save()


Kinds = type | tuple[type, ...]
Entries = Sequence[tuple[Kinds, type[StateHandler[Any]]]]


class HandlerRegistry:
    """Registry of the handler for each type; the first that fits is used.

    Args:
        entries: Types, and the handler of their objects.

    Attributes:
        entries: The same.
    """

    def __init__(self, entries: Entries) -> None:
        self.entries = list(entries)

    def handler_for(self, value: object) -> StateHandler[Any] | None:
        """Return a handler of this object; ``None`` if it is a mere value."""
        for kinds, handler in self.entries:
            if isinstance(value, kinds):
                return handler(value)
        return None


class HandledState(ObjectState):
    """State of a training: all values that any rank needs to continue from here.

    Each argument becomes an attribute. An object that the registry has a handler for stays the same object, and the handler saves,
    restores and synchronizes it; assigning to such an attribute replaces the object. Any other object is a value (it is
    copied and pickled).

    Args:
        registry: Finds the handlers, also of objects that are assigned later.
        kwargs: The attributes.
    """

    _registry: HandlerRegistry
    _handlers: dict[str, StateHandler[Any]]

    def __init__(self, registry: HandlerRegistry, /, **kwargs: Any) -> None:
        handlers: dict[str, StateHandler[Any]] = {}
        values: dict[str, Any] = {}
        for name, value in kwargs.items():
            handler = registry.handler_for(value)
            if handler is None:
                values[name] = value
            else:
                handlers[name] = handler
        # First, and not through __setattr__(), which needs them.
        object.__setattr__(self, "_handlers", handlers)
        object.__setattr__(self, "_registry", registry)
        #: The rank whose state :meth:`sync` has given to all; ``None`` for the first that lives.
        self._root: int | None = None
        #: Commits since the beginning of training up to the last sync, whichever ranks made them.
        self._commits_before = 0
        super().__init__(bcast_object=self._from_root, get_rank=rank, **values)
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make the state the same on all ranks: that of the rank that is ahead (:func:`~hvdlab.collectives.elastic.state.ahead`)."""
        election = elect(self._saves, self._commits_before + self._saves % ATTEMPT)
        source = election.source
        if election.replaced:
            logger.warning(
                "the state of this rank is replaced by that of rank %d, since each had begun to train while it could not reach the "
                "other: %d of its own commits are dropped, and training goes on after %d of that rank",
                source.rank,
                election.own.commits,
                source.commits,
            )
        if election.overtaken:
            for handler in self._handlers.values():
                handler.overtaken()
        for handler in self._handlers.values():
            handler.root = source.rank
            handler.sync()
        self._root = source.rank
        super().sync()
        # Last: a rank on which this fails is in the next election what it was in this one.
        self._saves, self._commits_before = election.saves, source.commits if source.begun else 0
        election.join()

    def reset(self) -> None:
        self._root = None  # that rank may be gone
        for handler in self._handlers.values():
            handler.root = None
            handler.reset()

    def _hand_over(self) -> bool:
        needed = False
        for handler in self._handlers.values():
            needed |= handler.hand_over()
        return needed

    def _agree(self, news: News) -> News:
        return merge_news(news)

    def _from_root(self, obj: Any) -> Any:
        return broadcast_object(obj, number_of(self._root))

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self._handlers
        if name in handlers:
            handlers[name].set_value(value)
        elif name in self.__dict__.get("_saved_state", ()):
            handler = self._registry.handler_for(value)  # such as the model that is made after the state
            if handler is not None:
                handlers[name] = handler
                # ObjectState would otherwise go on to copy and broadcast it as a value, beside its handler.
                del self._saved_state[name]
        super().__setattr__(name, value)
