"""The TensorFlow of this process; importing this module raises ``ImportError`` if it is missing or too old."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from packaging.version import Version

OLDEST = "2.15"
"""The oldest release of TensorFlow that hvdlab works with."""


def _imported() -> Any:
    try:
        module = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            "hvdlab.tensorflow needs TensorFlow, which is not installed; pip install 'hvdlab[tensorflow]', or for CPUs "
            "only: pip install tensorflow-cpu, then tf_keras without its dependencies.",
            name="tensorflow",
        ) from None
    if Version(module.__version__) < Version(OLDEST):
        raise ImportError(
            f"hvdlab.tensorflow works with TensorFlow {OLDEST} and newer; this is {module.__version__}.",
            name="tensorflow",
        )
    return module


tf: Any = _imported()
"""The module ``tensorflow``, which has no annotations that type checkers could use."""


def internal(name: str) -> Any:
    """Return a module of TensorFlow's that is not public, such as ``eager.core`` for ``tensorflow.python.eager.core``."""
    return importlib.import_module(f"tensorflow.python.{name}")


def _trace_ours_as_it_is() -> None:
    """Keep AutoGraph from rewriting hvdlab's functions when ``tf.function`` traces code that calls them.

    Rewriting is slow, makes tracebacks harder to read, and leaves a file for each function in the temporary directory if the
    process is killed. TensorFlow has no public setting for a whole package. In a release without the internal one, AutoGraph
    rewrites the functions, and they still work.
    """
    with suppress(ImportError, AttributeError, TypeError):
        config = internal("autograph.core.config")
        config.CONVERSION_RULES = (config.DoNotConvert("hvdlab"), *config.CONVERSION_RULES)


_trace_ours_as_it_is()
