"""``display()``, figures and values of expressions in a rank: sent as :class:`Display`, in order with the text."""

from __future__ import annotations

from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.rank.output import OutputQueue
from hvdlab.kernel_ext.wire.cells import Clear, Display
from hvdlab.kernel_ext.wire.text import wire_text, wire_value

LONGEST_TEXT = 1 << 20
"""Characters of a ``text/plain`` that are shown."""
LONGEST_BEGINNING = 1000
"""Characters of a longer text that are shown as a value."""
LARGEST_ITEM = 16 << 20
"""Bytes of one representation of a display; no browser shows more."""


class RankDisplayHook(DisplayHook):
    """Sends the value of a cell's last expression and keeps ``_``, ``__``, ``Out`` as IPython does."""

    def __init__(self, capture: OutputQueue, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]  # IPython is partly untyped
        self._capture = capture
        self.plain = ""
        """``text/plain`` of the last value."""
        self.remembers = True
        """Whether the cell that runs is one of the notebook's: its value becomes ``_`` and ``Out[n]``."""

    def __call__(self, result: Any = None) -> None:
        """Show the value. After a ``;`` it is not shown, but still is the cell's value."""
        super().__call__(result)  # type: ignore[no-untyped-call]  # as above
        if result is not None and self.quiet():  # type: ignore[no-untyped-call]  # as above
            self.fill_exec_result(result)  # type: ignore[no-untyped-call]  # as above

    def update_user_ns(self, result: Any) -> None:
        """Keep the value for the user."""
        if self.remembers:
            super().update_user_ns(result)  # type: ignore[no-untyped-call]  # as above

    def compute_format_data(self, result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a value in the formats to show; of a text too long to be shown only the beginning is formatted."""
        if isinstance(result, (str, bytes, bytearray)) and len(result) > LONGEST_TEXT:
            shown = f"{result[:LONGEST_BEGINNING]!r}… ({len(result):,} {'characters' if isinstance(result, str) else 'bytes'} in all)"
            return {"text/plain": shown}, {}
        found: tuple[dict[str, Any], dict[str, Any]] = super().compute_format_data(result)  # type: ignore[no-untyped-call]  # IPython is partly untyped
        return found

    def start_displayhook(self) -> None:
        """Nothing to prepare."""
        self._is_active = True

    def write_output_prompt(self) -> None:
        """Write nothing: the notebook writes the prompt."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Send the value's representations."""
        self.plain = str(format_dict.get("text/plain", ""))
        self._capture.put(Display(wire_bundle(format_dict), wire_bundle(md_dict or {}), result=True))

    def finish_displayhook(self) -> None:
        """Nothing to finish."""
        self._is_active = False

    def set_parent(self, parent: Any) -> None:
        """Messages of the Jupyter protocol have parents, cells of a pool have none."""


class RankDisplayPublisher(DisplayPublisher):
    """Sends what ``display``, ``update_display`` and ``clear_output`` publish."""

    def __init__(self, capture: OutputQueue, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]  # IPython is partly untyped
        self._capture = capture

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *args: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send a display, or with ``update`` a new content for the ones of its ``display_id``."""
        self._validate_data(data, metadata)  # type: ignore[no-untyped-call]  # as above
        display_id = wire_text(str((transient or {}).get("display_id", "")))
        self._capture.put(
            Display(
                wire_bundle(data), wire_bundle(metadata or {}), display_id=display_id, update=bool(update)
            )
        )

    def clear_output(self, wait: bool = False) -> None:
        """Clear what this rank's cell has shown so far."""
        self._capture.put(Clear(bool(wait)))

    def set_parent(self, parent: Any) -> None:
        """Ignored, as by the hook: cells of a pool have no parents."""


def wire_bundle(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a mime bundle that MessagePack and JSON can carry: images in base64, ``text/plain`` and the size bounded.

    ``text/plain`` names what can't be sent, with the reason; it never fails the cell that shows it.
    """
    clean: dict[str, Any] = {}
    missing: list[str] = []
    for key, value in bundle.items():
        try:
            size = _size(value)
            if size <= LARGEST_ITEM or key == "text/plain":
                clean[wire_text(str(key))] = wire_value(value)
            else:
                missing.append(
                    f"({key} of {size:,} bytes is too large to be shown; write it to a file instead)"
                )
        except Exception as error:  # noqa: BLE001  # the user's own methods may raise anything
            missing.append(f"({wire_text(str(key))} can't be sent: {one_line(error)})")
    text = clean.get("text/plain")
    if isinstance(text, str) and len(text) > LONGEST_TEXT:
        clean["text/plain"] = f"{text[:LONGEST_TEXT]}… ({len(text)} characters in all)"
    if missing:
        clean["text/plain"] = "\n".join([str(clean.get("text/plain", "")), *missing]).strip()
    return clean


def _size(value: Any) -> int:
    """Return the number of bytes that a representation takes, about."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return sum(map(_size, value))
    return 8
