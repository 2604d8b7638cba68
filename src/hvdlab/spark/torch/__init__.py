"""``horovod.spark.torch``: an estimator that trains a torch module on ranks, and the model that it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlab.spark.torch.estimator import TorchEstimator as TorchEstimator
    from hvdlab.spark.torch.estimator import TorchModel as TorchModel

__all__ = ["TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    # Ranks import this package for its training, and need no pyspark for that.
    if name not in __all__:
        raise AttributeError(f"module 'hvdlab.spark.torch' has no attribute {name!r}")
    from hvdlab.spark.torch import estimator

    return getattr(estimator, name)
