"""Horovod's module names: which module stands for each, and which are not there, and why."""

from __future__ import annotations

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
