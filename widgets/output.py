"""A cell's output that has two parts: a picture that stays in the notebook, and the widget, which hides it while it lives."""

from __future__ import annotations

import html
import uuid
from collections.abc import Callable
from typing import Any

from IPython.display import display

from hvdlab.collectives.failures import Failure, Failures

Data = dict[str, Any]
Publish = Callable[[Data, Data, str, bool], None]


class Output:
    """The output of one view.

    Args:
        still: Makes the picture that stays, as data by media type; it must carry ``name`` as a CSS class.
        failures: Where errors are kept; the picture says what they are.

    Attributes:
        name: Name of this output, also a CSS class.
        publish: ``publish(data, metadata, area, update)`` shows data in an area (if it has a name), or updates that area; by
            default under the cell that runs.
    """

    def __init__(self, kind: str, still: Callable[[], Data], failures: Failures) -> None:
        self.name = f"hvdlab-{kind}-{uuid.uuid4().hex[:12]}"
        self.publish: Publish = _under_running_cell
        self._make, self._failures = still, failures
        self._shown = False

    def _still(self) -> Data:
        data: Data = {"text/html": f'<div class="hvd-still {self.name}"></div>', "text/plain": ""}
        with self._failures.guard("the still picture"):
            data = self._make()
        found = self._failures.all()
        return data | {
            "text/html": data["text/html"].removesuffix("</div>") + html_of(found) + "</div>",
            "text/plain": data["text/plain"] + text_of(found),
        }

    def show(self, bundle: Any) -> None:
        """Show both parts; ``bundle`` is what the widget's ``_repr_mimebundle_`` returned."""
        self.publish(self._still(), {}, self.name, False)
        self._shown = True
        if bundle is not None:
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            self.publish({**data, "text/plain": ""}, {}, "", False)

    def refresh(self) -> None:
        """Put the present picture in the place of the last one, if that was ever shown."""
        if self._shown:
            self.publish(self._still(), {}, self.name, True)


def text_of(failures: tuple[Failure, ...]) -> str:
    """Return the failures as lines under a view's text; empty if there are none."""
    return "".join(f"\n{failure}" for failure in failures)


def html_of(failures: tuple[Failure, ...]) -> str:
    """Return the failures for the end of a view's picture; empty if there are none."""
    lines = "".join(
        f"<details><summary>{html.escape(str(one))}</summary><pre>{html.escape(one.trace)}</pre></details>"
        for one in failures
    )
    return f'<div class="hvd-failures">{lines}</div>' if lines else ""


def _under_running_cell(data: Data, metadata: Data, area: str, update: bool) -> None:
    where: dict[str, Any] = {"display_id": area, "update": update} if area else {}
    display(data, raw=True, metadata=metadata, **where)  # type: ignore[no-untyped-call]  # IPython has none here
