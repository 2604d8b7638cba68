"""Messages of a rank to its driver while a function runs: callbacks of ``RayExecutor.run`` and ``execute`` get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hvdlab.collectives import context

TOPIC = "hvdlab.ray.log"
"""Topic of the mail to the driver; its body is the dict as JSON."""


def log(info_dict: Mapping[str, Any]) -> None:
    """Give a dict to the driver's callbacks. Returns at once.

    Args:
        info_dict: Of JSON's types, or numbers that have ``item()``, such as numpy's and a tensor with one element.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
        TypeError: Something of it can't be sent.
    """
    context.engine("hvdlab.ray").post(TOPIC, msgspec.json.encode(dict(info_dict), enc_hook=_number))


def _number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} can't be logged; make a number or a text of it.")
