"""What ``import torch`` calls, by the entry point ``torch.backends``: makes the backend "hvdlab" known.

It costs well under a millisecond, as it imports nothing: all else is imported when a process group of this backend is made.
"""

from __future__ import annotations

import sys
from typing import Any

NAME = "hvdlab"


def register() -> None:
    """Let ``dist.init_process_group("hvdlab")`` and ``dist.new_group(backend="hvdlab")`` make groups of ours.

    Does nothing if that was done, or if this torch was built without ``torch.distributed``.
    """
    module: Any = sys.modules.get("torch.distributed")
    backend: Any = getattr(module, "Backend", None)
    if backend is not None and NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> Any:
    """Torch's creator of a group. Only now is anything of ours imported."""
    from hvdlab.torch.c10d.creating import create

    return create(options)
