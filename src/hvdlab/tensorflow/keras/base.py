"""The base class of hvdlab's callbacks, for models of Keras 3 and of Keras 2, whichever of the two ``tf.keras`` is."""

from __future__ import annotations

from typing import Any

from hvdlab.tensorflow.installed import tf

_Callback: Any = tf.keras.callbacks.Callback


class Callback(_Callback):  # type: ignore[misc,unused-ignore]
    """A callback of Keras 3 with the attributes and methods that Keras 2 expects of its own callbacks."""

    _supports_tf_logs = False
    _chief_worker_only: bool | None = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
