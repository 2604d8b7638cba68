"""``hvdlab.ray``: ranks that are actors of a Ray cluster, also as ``horovod.ray``.

It needs Ray (``pip install hvdlab[ray]``), which is imported when ranks are started.
"""

from __future__ import annotations

from hvdlab.ray.elastic import ElasticRayExecutor
from hvdlab.ray.runner import RayExecutor
from hvdlab.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
