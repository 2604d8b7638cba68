"""``export()``: handing this rank's metrics, or those of all ranks, to an exporter."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives import context
from hvdlab.collectives.engine.telemetry import RankExport
from hvdlab.collectives.metrics.exporting import Exporter, checked, patterns


def export(exporter: Exporter, names: str | Sequence[str] = "*", *, all_ranks: bool = False) -> RankExport:
    """Hand metrics to a tracker from now on: those of ``hvd.metric()``, and hvdlab's own.

    They reach it a moment after they were recorded, on a thread of its own: a tracker that is slow or away does not hold up the
    training. Once 100,000 points wait, the oldest are dropped, and counted. Exporting to the same place again replaces the
    export before, so a cell may be run twice.

    Args:
        exporter: One of :mod:`hvdlab.exporters`, or any object with ``write(points)`` and ``close()``, see
            :class:`hvdlab.collectives.metrics.exporting.Exporter`.
        names: Patterns of the metrics that are wanted, such as ``["loss*", "hvdlab/step_time"]``.
        all_ranks: Also hand over what the other ranks record. Then call it on one rank.

    Returns:
        The export, with ``exported``, ``dropped`` and ``failed`` counts. ``close()`` ends it, and so does ``hvd.shutdown()``
        or the end of the program.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
        InvalidRequestError: ``exporter`` lacks one of the methods.
    """
    engine = context.engine("hvd.export()")
    checked(exporter)
    return engine.exports.add(exporter, patterns(names), all_ranks)
