"""Exporters for ``hvd.export()``: where metrics may go. Each imports its package when it is made."""

from __future__ import annotations

from hvdlab.collectives.metrics.exporters.json_lines import JsonLines
from hvdlab.collectives.metrics.exporters.mlflow import MLflow
from hvdlab.collectives.metrics.exporters.tensorboard import TensorBoard
from hvdlab.collectives.metrics.exporters.wandb import WandB
from hvdlab.collectives.metrics.exporting import Export, Exporter
from hvdlab.collectives.metrics.points import Point

__all__ = ["Export", "Exporter", "JsonLines", "MLflow", "Point", "TensorBoard", "WandB"]
