"""A cell's output that has two parts: a picture that stays in the notebook, and the widget, which hides it while it lives."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from IPython.display import display

Data = dict[str, Any]


class Output:
    """The output of one view.

    Args:
        still: Makes the picture that stays, as data by media type; it must carry ``name`` as a CSS class.

    Attributes:
        name: Name of this output, also a CSS class.
    """

    def __init__(self, kind: str, still: Callable[[], Data]) -> None:
        self.name = f"hvdlab-{kind}-{uuid.uuid4().hex[:12]}"
        self._still = still
        self._shown = False

    def show(self, bundle: Any) -> None:
        """Show both; ``bundle`` is what the widget's ``_repr_mimebundle_`` returned."""
        self._display(self._still(), display_id=self.name)
        self._shown = True
        if bundle is not None:
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            self._display({**data, "text/plain": ""})

    def refresh(self) -> None:
        """Put the present picture in the place of the last one, if that was ever shown."""
        if self._shown:
            self._display(self._still(), display_id=self.name, update=True)

    def _display(self, data: Data, **where: Any) -> None:
        display(data, raw=True, **where)  # type: ignore[no-untyped-call]  # IPython has none here
