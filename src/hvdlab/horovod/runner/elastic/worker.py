"""``horovod.runner.elastic.worker``: notifications to ranks of hosts that come and go."""

from __future__ import annotations

from hvdlab.collectives.elastic import HostUpdateResult
from hvdlab.collectives.elastic import NotificationManager as WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
