"""Imports of ``horovod`` and its modules, answered with modules of hvdlab.

A module has one identity: ``horovod.torch`` *is* ``hvdlab.torch``, under two names in ``sys.modules``. So classes,
``isinstance``, monkeypatching and pickles agree, whichever name they were reached by.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from hvdlab.horovod.modules import OWN, ROOT, horovod_name, target, why_absent


class SameModule(InspectLoader):
    """Loads a module by importing the module of which it is another name."""

    def __init__(self, name: str, loaded: Callable[[str], None]) -> None:
        self._name = name
        self._loaded = loaded

    def exec_module(self, module: ModuleType) -> None:
        """Put the other module in the place of the empty one that was made for it; the import returns that."""
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._name)
        self._loaded(module.__spec__.name)

    def _loader(self) -> InspectLoader:
        spec = importlib.util.find_spec(self._name)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            raise ImportError(f"{self._name} can't be run", name=self._name)
        return spec.loader

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``."""
        return self._loader().get_code(self._name)

    def get_source(self, fullname: str) -> str | None:
        return self._loader().get_source(self._name)

    def is_package(self, fullname: str) -> bool:
        return self._loader().is_package(self._name)


class HorovodFinder(MetaPathFinder):
    """Finds ``horovod`` and its modules in hvdlab; Python must ask it before all other finders.

    Args:
        loaded: Called with ``horovod`` when it is imported.
    """

    def __init__(self, loaded: Callable[[], None]) -> None:
        self._loaded = loaded

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target_module: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The specification of one of Horovod's modules; ``None`` for all others.

        Raises:
            ModuleNotFoundError: hvdlab does not have this module; the text says what to use.
        """
        name = horovod_name(fullname)
        if name is None:
            return None
        why = why_absent(name)
        if why is not None:
            raise ModuleNotFoundError(why, name=name)
        stands_for = target(name)
        if stands_for == fullname:
            return None
        found = importlib.util.find_spec(stands_for)
        if found is None:
            return None
        loader = SameModule(stands_for, self._on_load)
        spec = ModuleSpec(
            fullname,
            loader,
            origin=found.origin,
            is_package=found.submodule_search_locations is not None,
        )
        if found.submodule_search_locations is not None:
            spec.submodule_search_locations = list(found.submodule_search_locations)
        return spec

    def _on_load(self, fullname: str) -> None:
        if fullname == ROOT:
            self._loaded()


def is_ours(module: ModuleType) -> bool:
    """Whether a module that goes by one of Horovod's names is one of hvdlab's."""
    return getattr(module, "__name__", "").startswith(OWN.partition(".")[0] + ".")
