"""Exporters for ``hvd.export()``: where metrics may go. Each imports its package when it is made."""

from __future__ import annotations

from hvdlab.collectives.metrics.export import Export, Exporter, Point
from hvdlab.collectives.metrics.exporters import JsonLines, MLflow, TensorBoard, WandB

__all__ = ["Export", "Exporter", "JsonLines", "MLflow", "Point", "TensorBoard", "WandB"]
