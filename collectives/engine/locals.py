"""Local ids: a tensor's signature and call site as an integer that this rank has told the coordinator once."""

from __future__ import annotations

import math
from collections import OrderedDict

from hvdlab.collectives.engine.entry import (
    ANNOUNCED,
    NO_LOCAL,
    Entry,
    Key,
    Local,
    matched_shape,
    signature_of,
)

LOCAL_LIMIT = 4096


class Locals:
    """What this rank's local ids stand for, and the entries that were announced under them.

    Args:
        limit: How many ids there are before the least recently used ones are given to other signatures.
    """

    def __init__(self, limit: int = LOCAL_LIMIT) -> None:
        self.by_id: dict[int, Local] = {}
        self._limit = limit
        self._by_key: OrderedDict[Key, Local] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def queue(self, entry: Entry) -> None:
        """Give an entry its local id, and queue it behind the entries that have the same."""
        entry.local = local = self.local_of(entry)
        entry.phase = ANNOUNCED
        local.queue.append(entry)

    def local_of(self, entry: Entry) -> Local:
        """The local id for entries like this one, defined if it is new."""
        request = entry.request
        shape = matched_shape(request)
        if request.prescale != request.prescale:
            request.prescale = math.nan  # one object, which the dict finds again: one id for all NaN
        if request.postscale != request.postscale:
            request.postscale = math.nan
        key: Key = (
            entry.name, request.kind, shape, request.dtype, request.op, entry.site, request.process_set, request.root,
            request.prescale, request.postscale, request.group, request.device, request.ranks, request.channel, request.about,
            request.priority,
        )  # fmt: skip
        local = self._by_key.get(key)
        if local is None:
            local = self._define(key, entry, shape)
        elif len(self._by_key) * 2 > self._limit:
            self._by_key.move_to_end(key)  # order only matters once ids become scarce
        return local

    def unqueue(self, entry: Entry) -> None:
        """Take an announced entry out of the queue of its local id."""
        local = entry.local
        if entry.phase == ANNOUNCED and local is not NO_LOCAL:
            if local.queue and local.queue[0] is entry:
                local.queue.popleft()
            elif entry in local.queue:
                local.queue.remove(entry)

    def take(self, id: int) -> Entry | None:
        """The oldest entry that was announced as ``id``, or ``None`` if none is left."""
        local = self.by_id.get(id)
        return local.queue.popleft() if local is not None and local.queue else None

    def clear(self) -> None:
        """Forget all ids: they are defined anew."""
        self._by_key.clear()
        self.by_id.clear()
        self._next = 0

    def _define(self, key: Key, entry: Entry, shape: tuple[int, ...]) -> Local:
        id = self._free_id()
        request = entry.request
        signature = signature_of(request, entry.name, shape)
        local = Local(id, key, signature, entry.site + request.about, request.priority)
        self._by_key[key] = local
        self.by_id[id] = local
        return local

    def _free_id(self) -> int:
        """A new id while there are fewer than the limit; then the least recently used one that has nothing in flight, if there is one."""
        if self._next >= self._limit:
            for key, local in self._by_key.items():
                if not local.queue:
                    del self._by_key[key]
                    return local.id
        self._next += 1
        return self._next - 1

    def validate(self) -> None:
        """Assert what must hold between calls."""
        ids = [local.id for local in self._by_key.values()]
        assert len(ids) == len(set(ids)), "an id stands for two things"
        for local in self._by_key.values():
            assert self.by_id[local.id] is local
            for entry in local.queue:
                assert entry.phase == ANNOUNCED, entry.phase
        assert len(self._by_key) <= max(self._limit, self._next)
