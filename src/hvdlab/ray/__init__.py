"""``hvdlab.ray``: ranks that are actors of a Ray cluster, also as ``horovod.ray``.

It needs Ray (``pip install hvdlab[ray]``), which is imported when ranks are started.

Example:
    >>> import ray
    >>> from hvdlab.ray import RayExecutor
    >>> _ = ray.init(num_cpus=1, include_dashboard=False)
    >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=1)
    >>> executor.start()
    >>> executor.run(lambda: 6 * 7)
    [42]
    >>> executor.shutdown()
    >>> ray.shutdown()
"""

from __future__ import annotations

from hvdlab.ray.elastic import ElasticRayExecutor
from hvdlab.ray.runner import RayExecutor
from hvdlab.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
