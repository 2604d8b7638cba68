"""Data loaders: a base to derive from, and a mixin that loads ahead in a thread.

Example:
    >>> from hvdlab.data import AsyncDataLoaderMixin, BaseDataLoader
    >>> class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    ...     def __init__(self, dataset, *args, **kwargs):
    ...         super().__init__(*args, **kwargs)
    ...         self.dataset = dataset
    ...
    ...     def __len__(self):
    ...         return len(self.dataset)
    ...
    ...     def _iterate(self):
    ...         yield from self.dataset
    >>> list(Loader([1, 2, 3], async_loader_queue_size=8))
    [1, 2, 3]
"""

from __future__ import annotations

# Horovod's package binds this submodule by its own imports.
from hvdlab.data import data_loader_base
from hvdlab.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader", "data_loader_base"]
