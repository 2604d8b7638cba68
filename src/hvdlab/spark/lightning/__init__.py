"""``horovod.spark.lightning``: an estimator that trains a LightningModule on ranks, and the model that it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlab.spark.lightning.estimator import LightningEstimator as LightningEstimator
    from hvdlab.spark.lightning.estimator import LightningEstimator as TorchEstimator
    from hvdlab.spark.lightning.estimator import TorchModel as TorchModel

__all__ = ["LightningEstimator", "TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    # Ranks import this package for its training, and need no pyspark for that.
    if name not in __all__:
        raise AttributeError(f"module 'hvdlab.spark.lightning' has no attribute {name!r}")
    from hvdlab.spark.lightning import estimator

    # Horovod calls the estimators of torch and of Lightning by one name.
    return getattr(estimator, "LightningEstimator" if name == "TorchEstimator" else name)
