"""Elastic training, for any framework: state that survives the loss of a rank, and the loop around the training.

:func:`run_fn` makes a training function elastic. Its first argument is a :class:`State`, which keeps the last commit
and brings it to all ranks when they begin again.
"""

from __future__ import annotations

from hvdlab.collectives.elastic.state import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    NotificationManager,
    ObjectState,
    State,
    notification_manager,
)
from hvdlab.collectives.elastic.training_loop import run_fn

__all__ = [
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "NotificationManager",
    "ObjectState",
    "State",
    "notification_manager",
    "run_fn",
]
