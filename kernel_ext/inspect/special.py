"""State of ranks besides their variables: random numbers, versions and settings."""

from __future__ import annotations

import os
import platform
import random
import re
import sys
from importlib import metadata
from typing import Any

from hvdlab.bindings.framework_hooks import hooks_of, loaded, names
from hvdlab.kernel_ext.inspect.scalars import Hidden

_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# Environment variables that are meant to differ from rank to rank, or that the launcher has set.
_OWN = re.compile(
    r"(.*_)?(RANK|PROCID|LOCALID|NODEID)$|HVDLAB_|HOROVOD_|PMI_|PMIX_|OMPI_|JPY_|IPP_|OLDPWD$|_$"
)


def special_value(name: str) -> Any:
    """The value to be examined for one of :data:`SPECIAL`."""
    return random_states() if name == "rng" else environment()


def random_states() -> dict[str, Any]:
    """The states of the generators that all code of a process shares."""
    found: dict[str, Any] = {"random": random.getstate()[1:]}
    for hooks in loaded():
        found |= hooks.random_states()
    return found


def environment() -> dict[str, Any]:
    """Versions, environment variables (of secret ones only fingerprints leave the rank) and settings that change results."""
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "machine": platform.processor() or platform.machine(),
            "path": list(sys.path),
            "directory": os.getcwd(),
            "hash randomization": bool(sys.flags.hash_randomization),
        },
        "versions": {
            dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"]
        },
        "variables": {name: _shown(name, text) for name, text in os.environ.items() if not _OWN.match(name)},
        **{name: hooks_of(name).settings() if sys.modules.get(name) else {} for name in names()},
    }


def _shown(name: str, text: str) -> str:
    return Hidden(text) if _SECRET.search(name) else text
