"""``torch.distributed`` on hvdlab's collective core: ``dist.init_process_group("hvdlab")``.

Importing this module registers the backend with torch; if hvdlab is installed, ``import torch`` has done so already.
"""

from __future__ import annotations

import torch.distributed  # register() needs it  # noqa: F401

from hvdlab.torch.c10d.process_group import HvdlabProcessGroup
from hvdlab.torch.c10d.reconfiguration import reconfigure
from hvdlab.torch.c10d.resync import Agreement, agree
from hvdlab.torch.c10d.watch_options import WatchOptions
from hvdlab.torch_backend import register

__all__ = ["Agreement", "HvdlabProcessGroup", "WatchOptions", "agree", "reconfigure"]

register()
