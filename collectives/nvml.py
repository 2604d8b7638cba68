"""NVIDIA's management library, by way of its Python bindings (``nvidia-ml-py``), where both are there."""

from __future__ import annotations

import importlib
import logging
from typing import Any

logger = logging.getLogger(__name__)


def opened(purpose: str) -> Any:
    """The module ``pynvml``, initialized; the caller ends it with ``nvmlShutdown()``.

    Args:
        purpose: What does not happen without it, for the log: ``GPUs are not sampled``.

    Returns:
        ``None`` without GPUs, their driver or ``nvidia-ml-py``.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("%s: %s", purpose, error)
        return None
    return pynvml
