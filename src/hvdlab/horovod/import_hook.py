"""Hook for imports by which ``import horovod`` means hvdlab, in this process and in those it starts.

Two ways lead there. :class:`HorovodFinder` answers every import of Horovod's names. The
directory ``shim`` has a package ``horovod`` that puts the finder in place when it is imported: as the last entry of
``sys.path`` it costs nothing until then, hides no Horovod that is installed, and reaches other processes by
``PYTHONPATH``, however they are started.

A module has one identity: ``horovod.torch`` *is* ``hvdlab.torch``, under two names in ``sys.modules``. So classes, ``isinstance``,
monkeypatching and pickles agree, whichever name they were reached by. :data:`STANDS_FOR` lists the modules of hvdlab that stand for
Horovod's, :data:`ABSENT` those that are not there, and why.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

from hvdlab._version import __version__

ROOT = "horovod"
OWN = "hvdlab.horovod"
"""The package whose modules have Horovod's names, where nothing else is said."""

STANDS_FOR = {
    "horovod.torch": "hvdlab.torch",
    "horovod.tensorflow": "hvdlab.tensorflow",
    "horovod.tensorflow.util": "hvdlab.tensorflow.functions",
    "horovod.keras": "hvdlab.keras",
    "horovod.mxnet": "hvdlab.mxnet",
    "horovod.ray": "hvdlab.ray",
    "horovod.spark": "hvdlab.spark",
    "horovod.common.process_sets": "hvdlab.collectives.process_sets",
    "horovod.common.elastic": "hvdlab.collectives.elastic",
    "horovod.data": "hvdlab.data",
}
"""Modules that are elsewhere in hvdlab, together with what is in them."""

_DRIVER = "is not part of hvdlab: it is the inside of Horovod's elastic launcher. Use `hvdlab run --host-discovery-script`."

ABSENT = {
    "horovod.runner.elastic.driver": _DRIVER,
    "horovod.runner.elastic.registration": _DRIVER,
    "horovod.runner.elastic.rendezvous": _DRIVER,
    "horovod.runner.elastic.settings": _DRIVER,
    "horovod.runner.common": "is not part of hvdlab: it is the inside of Horovod's launcher. Use `hvdlab run`.",
    "horovod.tensorflow.data": "is not part of hvdlab: it serves tf.data pipelines from ranks to ranks. Shard the data set instead: "
    "dataset.shard(hvd.size(), hvd.rank()).",
    "horovod.runner.driver": "is not part of hvdlab: it is the inside of Horovod's launcher. Use `hvdlab run`.",
    "horovod.runner.http": "is not part of hvdlab: it is the inside of Horovod's launcher. Use `hvdlab run`.",
    "horovod.runner.util": "is not part of hvdlab: it is the inside of Horovod's launcher. Use `hvdlab run`.",
}
"""What an import of these modules says after their name."""


_PRESENT = frozenset(
    {"horovod.runner.common", "horovod.runner.common.util", "horovod.runner.common.util.env"}
)
"""Modules that are there although others of their package are not."""


def horovod_name(fullname: str) -> str | None:
    """Return Horovod's name of a module that is imported as ``horovod.x`` or, by ``from horovod import x``, under hvdlab's name."""
    if fullname == ROOT or fullname.startswith(ROOT + "."):
        return fullname
    if fullname.startswith(OWN + "."):
        return ROOT + fullname.removeprefix(OWN)
    return None


def target(name: str) -> str:
    """Return the module of hvdlab that stands for ``horovod.x``, whether there is one or not."""
    head, tail = name, ""
    while head:
        if head in STANDS_FOR:
            return STANDS_FOR[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return OWN + name.removeprefix(ROOT)


def why_absent(name: str) -> str | None:
    """Return the text for a program that imports a module which is not there; ``None`` for an unknown module."""
    head = "" if name in _PRESENT else name
    while head:
        if head in ABSENT:
            return f"{head} {ABSENT[head]}"
        head = head.rpartition(".")[0]
    return None


VARIABLE = "HVDLAB_AS_HOROVOD"
SHIM = str(Path(__file__).with_name("shim"))

_RANK_VARIABLES = (
    "HVDLAB_RANK", "HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID",
)  # fmt: skip

_log = logging.getLogger("hvdlab")
#: Lines that this process has logged; each is logged once.
_said: set[str] = set()
_environ_before: dict[str, str | None] = {}
"""What the environment held before it was changed for the processes that are started from here."""


class Mode(Enum):
    """Value of ``HVDLAB_AS_HOROVOD``."""

    OFF = "0"
    IF_MISSING = ""
    ALWAYS = "1"


def mode(environ: Mapping[str, str]) -> Mode:
    """Return the user's choice: ``0`` is off, ``1`` always, and any other value if no Horovod is installed."""
    text = environ.get(VARIABLE, "").strip().lower()
    if text in ("0", "false", "no", "off"):
        return Mode.OFF
    return Mode.ALWAYS if text in ("1", "true", "yes", "on") else Mode.IF_MISSING


def install_as_horovod(force: bool = False) -> bool:
    """Let ``import horovod`` and ``import horovod.torch`` mean hvdlab in this process from now on.

    One line is logged about it. An installed Horovod stays in place, unless ``force`` is true.

    Args:
        force: Whether to stand in for an installed Horovod as well.

    Returns:
        Whether the names mean hvdlab now.

    Raises:
        ImportError: ``force`` is true, and Horovod itself was imported already.
    """
    if _finders():
        _announce()
        return True
    imported = _imported()
    if imported is not None:
        if force:
            raise ImportError(
                f"Horovod itself was imported already, from {getattr(imported, '__file__', None)}. "
                "Call hvdlab.install_as_horovod(force=True) before anything imports horovod."
            )
        _say(f"`import horovod` stays Horovod, which was imported from {getattr(imported, '__file__', None)}")
        return False
    if not force:
        there = installed()
        if there is not None:
            _say(f"`import horovod` stays the Horovod at {there.origin}; force=True makes it hvdlab")
            return False
    _activate()
    if force:
        _forced()
    _announce()
    return True


def uninstall() -> None:
    """Undo :func:`install_as_horovod` and :func:`offer`. Modules that were imported by Horovod's names stay usable."""
    for finder in _finders():
        sys.meta_path.remove(finder)
    sys.path[:] = [entry for entry in sys.path if entry != SHIM]
    for name, value in _environ_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _environ_before.clear()
    for name, module in list(sys.modules.items()):
        if _of_horovod(name) and is_ours(module) and module.__name__ != name:
            del sys.modules[name]
    _said.clear()


def offer(environ: Mapping[str, str] | None = None) -> None:
    """Let ``import horovod`` mean hvdlab if no other package is installed under that name, as a pool does in its ranks.

    Costs next to nothing; the line is logged when ``horovod`` is first imported. ``HVDLAB_AS_HOROVOD=0`` prevents it,
    ``HVDLAB_AS_HOROVOD=1`` also hides an installed Horovod.
    """
    chosen = mode(os.environ if environ is None else environ)
    if chosen is Mode.OFF:
        return
    if chosen is Mode.ALWAYS and _imported() is None and not _finders():
        _activate()
        _forced()
    elif SHIM not in sys.path:
        sys.path.append(SHIM)


def environment(environ: Mapping[str, str], force: bool = False) -> dict[str, str]:
    """Return the variables to set for a Python process in which ``import horovod`` is to mean hvdlab.

    Args:
        environ: The environment that the process would have otherwise.
        force: Whether to hide an installed Horovod as well.

    Returns:
        ``PYTHONPATH``, and with ``force`` also ``HVDLAB_AS_HOROVOD``.
    """
    given = environ.get("PYTHONPATH", "")
    # Empty entries stay: they stand for the working directory. An empty variable has none.
    entries = [entry for entry in given.split(os.pathsep) if entry != SHIM] if given else []
    entries.insert(0 if force else len(entries), SHIM)
    found = {"PYTHONPATH": os.pathsep.join(entries)}
    return {**found, VARIABLE: Mode.ALWAYS.value} if force else found


def stand_in() -> None:
    """Turn the shim's package ``horovod`` into hvdlab's, or into the one that it must not hide.

    Raises:
        ModuleNotFoundError: ``HVDLAB_AS_HOROVOD`` is 0, and no Horovod is installed.
    """
    chosen = mode(os.environ)
    real = None if chosen is Mode.ALWAYS else installed()
    if real is not None:
        assert real.loader is not None
        # Before its code runs, as Python itself does: the package imports modules of its own.
        module = sys.modules[ROOT] = importlib.util.module_from_spec(real)
        real.loader.exec_module(module)
    elif chosen is Mode.OFF:
        raise ModuleNotFoundError(f"No module named 'horovod' ({VARIABLE} is 0)", name=ROOT)
    else:
        _activate()
        # The import that has begun returns the module that is here once the shim's code has run.
        sys.modules[ROOT] = importlib.import_module(OWN)
        _announce()


def installed() -> ModuleSpec | None:
    """Return the Horovod that is installed beside hvdlab, if there is one."""
    path = [entry for entry in sys.path if entry != SHIM]
    for finder in sys.meta_path:
        if isinstance(finder, HorovodFinder):
            continue
        # Without a path this finder would look into ``sys.path``, where the shim is.
        by_path = isinstance(finder, type) and issubclass(finder, PathFinder)
        spec = finder.find_spec(ROOT, path if by_path else None)
        # A directory that happens to be called horovod has no origin.
        if spec is not None and spec.origin is not None and not spec.origin.startswith(SHIM):
            return spec
    return None


def _activate() -> None:
    sys.meta_path.insert(0, HorovodFinder())
    if SHIM not in sys.path:  # for processes that multiprocessing spawns, which get this path
        sys.path.append(SHIM)


def _forced() -> None:
    """Let processes that are started from here, with this path or this environment, do as this process does."""
    sys.path.remove(SHIM)
    sys.path.insert(1, SHIM)  # other tools inspect, and replace, the first finder
    for name, value in environment(os.environ, force=True).items():
        _environ_before[name] = os.environ.get(name)
        os.environ[name] = value


def _finders() -> list[HorovodFinder]:
    return [finder for finder in sys.meta_path if isinstance(finder, HorovodFinder)]


def _of_horovod(name: str) -> bool:
    return name == ROOT or name.startswith((ROOT + ".", OWN + "."))


def _imported() -> ModuleType | None:
    """Return a module of Horovod itself that is imported; ``None`` if none is."""
    names = [name for name in sys.modules if name == ROOT or name.startswith(ROOT + ".")]
    return next((sys.modules[name] for name in sorted(names) if not is_ours(sys.modules[name])), None)


def _announce() -> None:
    _say(f"`import horovod` means hvdlab {__version__} here")


def _say(text: str) -> None:
    """Log a line once in this process; shown even where logging was not set up, but not by every rank."""
    if text in _said:
        return
    _said.add(text)
    if _log.hasHandlers() and _log.isEnabledFor(logging.INFO):
        _log.info(text)
    elif all(os.environ.get(name, "0") in ("", "0") for name in _RANK_VARIABLES):
        print(f"hvdlab: {text}", file=sys.stderr)


class SameModule(InspectLoader):
    """Loader of a module that is another name of an existing module, which it imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        """Put the other module in the place of the empty one that was made for it; the import returns that."""
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._name)
        if module.__spec__.name == ROOT:
            _announce()

    def _loader(self) -> InspectLoader:
        spec = importlib.util.find_spec(self._name)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            raise ImportError(f"{self._name} can't be run", name=self._name)
        return spec.loader

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for ``python -m``."""
        return self._loader().get_code(self._name)

    def get_source(self, fullname: str) -> str | None:
        return self._loader().get_source(self._name)

    def is_package(self, fullname: str) -> bool:
        return self._loader().is_package(self._name)


class HorovodFinder(MetaPathFinder):
    """Finder of ``horovod`` and its modules in hvdlab; Python must ask it before all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target_module: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the specification of one of Horovod's modules; ``None`` for all others.

        Raises:
            ModuleNotFoundError: hvdlab does not have this module; the message names the replacement.
        """
        name = horovod_name(fullname)
        if name is None:
            return None
        why = why_absent(name)
        if why is not None:
            raise ModuleNotFoundError(why, name=name)
        stands_for = target(name)
        # The name is that of hvdlab's own module, which its usual finder loads.
        if stands_for == fullname:
            return None
        found = importlib.util.find_spec(stands_for)
        if found is None:
            return None
        loader = SameModule(stands_for)
        spec = ModuleSpec(
            fullname,
            loader,
            origin=found.origin,
            is_package=found.submodule_search_locations is not None,
        )
        if found.submodule_search_locations is not None:
            spec.submodule_search_locations = list(found.submodule_search_locations)
        return spec


def is_ours(module: ModuleType) -> bool:
    """Return whether a module that goes by one of Horovod's names is one of hvdlab's."""
    return getattr(module, "__name__", "").startswith(OWN.partition(".")[0] + ".")
