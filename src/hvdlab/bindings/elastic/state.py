"""An elastic state whose attributes are taken care of by handlers: what a framework's own state is made of."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.elastic.handlers import HandlerRegistry, StateHandler
from hvdlab.bindings.elastic.place import number_of
from hvdlab.bindings.objects import broadcast_object
from hvdlab.collectives.basics import rank
from hvdlab.collectives.elastic.state import News, ObjectState, elect, is_overtaken, merge_news, next_attempt


class HandledState(ObjectState):
    """The state of a training: what it takes to go on from here, on any rank.

    Each argument becomes an attribute. What the registry has a handler for stays the object it is, and the handler saves,
    restores and synchronizes it; assigning to such an attribute replaces the object. Anything else is a value (it is
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
        self._root: int | None = None
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
        """Make the state the same on all ranks: that of the rank that has committed most often (at the start, the first)."""
        root, saves = elect(self._saves)
        if is_overtaken(self._saves, saves):
            for handler in self._handlers.values():
                handler.overtaken()
        for handler in self._handlers.values():
            handler.root = root
            handler.sync()
        self._root = root
        super().sync()
        self._saves = next_attempt(saves)

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
                del self._saved_state[name]
        super().__setattr__(name, value)
