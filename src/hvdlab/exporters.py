"""Exporters for ``hvd.export()``: where metrics may go. Each imports its package when it is made.

Example:
    >>> import tempfile, time
    >>> from pathlib import Path
    >>> from hvdlab.exporters import JsonLines, Point
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     exporter = JsonLines(Path(directory, "metrics.jsonl"))  # for hvd.export(exporter)
    ...     exporter.write([Point(rank=0, name="loss", time=12.5, value=0.25, step=3)])
    ...     exporter.close()
    ...     Path(directory, "metrics.jsonl").read_text()
    '{"time": 12.5, "rank": 0, "name": "loss", "value": 0.25, "step": 3}\\n'
"""

from __future__ import annotations

from hvdlab.collectives.metrics.export import Export, Exporter, JsonLines, MLflow, Point, TensorBoard, WandB

__all__ = ["Export", "Exporter", "JsonLines", "MLflow", "Point", "TensorBoard", "WandB"]
