"""``horovod.spark.keras``: an estimator that trains a Keras model on ranks, and the model that it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlab.spark.keras.estimator import KerasEstimator as KerasEstimator
    from hvdlab.spark.keras.estimator import KerasModel as KerasModel

__all__ = ["KerasEstimator", "KerasModel"]


def __getattr__(name: str) -> Any:
    # Ranks import this package for its training, and need no pyspark for that.
    if name not in __all__:
        raise AttributeError(f"module 'hvdlab.spark.keras' has no attribute {name!r}")
    from hvdlab.spark.keras import estimator

    return getattr(estimator, name)
