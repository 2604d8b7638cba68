"""Does what the buttons of a membership view ask for: resize, repair, restart and sync of a pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvdlab.collectives.errors import InvalidRequestError, format_ranks
from hvdlab.widgets.membership_rows import MembershipState

Content = Mapping[str, Any]

LOST = "lost"


class ChangeablePool(Protocol):
    """Pool whose ranks can be shown and changed; :class:`hvdlab.kernel_ext.notebook.pool.Pool` is one."""

    @property
    def replaceable(self) -> bool: ...
    @property
    def state(self) -> str: ...
    def elastic(self) -> MembershipState: ...
    def on_membership_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...
    def resize(self, np: int) -> None: ...
    def repair(self) -> tuple[int, ...]: ...
    def restart(self, ranks: Sequence[int] | None = None) -> None: ...
    def sync(self, ranks: Sequence[int] | None = None) -> object: ...


class MembershipActions:
    """One action at a time, on a thread of its own: some take a minute.

    Args:
        pool: The pool that is changed.
        changed: Called on any thread when :attr:`busy` has changed.

    Attributes:
        busy: What is being done; empty if nothing is.
    """

    def __init__(self, pool: ChangeablePool, changed: Callable[[], None]) -> None:
        self._pool, self._changed = pool, changed
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.busy = ""

    def start(self, content: Content, answer: Callable[[dict[str, Any]], None]) -> None:
        """Begin what ``content`` asks for.

        Args:
            content: ``what``: ``resize`` (with ``np``), ``repair``, ``restart`` (with ``ranks``) or ``sync``; ``ends``: the
                ranks that the user has agreed to end by it. If others would end as well, since the pool has changed
                meanwhile, nothing is done.
            answer: Called once with ``text``, or with ``error`` and a sentence, on this thread or another one.
        """
        with self._starting:
            if self.busy:
                answer({"error": f"wait until this is done: {self.busy}"})
                return
            try:
                label, act = self._prepared(content)
            except Exception as error:  # noqa: BLE001  (the page waits for an answer, whatever has failed)
                answer({"error": str(error) or type(error).__name__})
                return
            self.busy = label
            self._thread = threading.Thread(
                target=self._run, args=(act, answer), name="hvdlab-membership-action", daemon=True
            )
            self._thread.start()
        self._changed()

    def _run(self, act: Callable[[], str], answer: Callable[[dict[str, Any]], None]) -> None:
        try:
            reply = {"text": act()}
        except Exception as error:  # noqa: BLE001  (the page says it; there is no cell that could)
            reply = {"error": str(error) or type(error).__name__}
        self.busy = ""
        try:
            self._changed()
        finally:
            answer(reply)

    def _prepared(self, content: Content) -> tuple[str, Callable[[], str]]:
        """The action that a view asks for, in words, and the function that carries it out.

        Raises:
            InvalidRequestError: The request makes no sense, or would end ranks that the user has not agreed to end.
        """
        pool, what = self._pool, content.get("what")
        state = pool.elastic()
        living = [rank for rank, text in state.members.items() if not text.startswith(LOST)]
        if what == "resize":
            size = content.get("np")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InvalidRequestError("say how many ranks there shall be: 1 or more.")
            self._check_ends([rank for rank in living if rank >= size], content)
            return f"resize to {size}", lambda: self._resized(size)
        if what == "repair":
            return "repair", self._repaired
        if what == "restart":
            asked = content.get("ranks")
            ranks = sorted({r for r in asked if isinstance(r, int)}) if isinstance(asked, list) else []
            if not ranks or len(ranks) != len(asked or ()):
                raise InvalidRequestError("say which ranks shall be started again.")
            self._check_ends([rank for rank in ranks if rank in living], content)
            return f"restart of {format_ranks(ranks)}", lambda: self._restarted(ranks)
        if what == "sync":
            return "sync", lambda: str(pool.sync())
        raise InvalidRequestError(f"ranks can't be changed by `{what}`.")

    def _check_ends(self, ending: Sequence[int], content: Content) -> None:
        agreed = content.get("ends")
        known = agreed if isinstance(agreed, list) else []
        if others := [rank for rank in ending if rank not in known]:
            raise InvalidRequestError(
                f"nothing was done: {format_ranks(others)} would end, too, and you were not asked about that; the pool has "
                "changed meanwhile."
            )

    def _resized(self, size: int) -> str:
        self._pool.resize(size)
        return f"the pool has {size} {'rank' if size == 1 else 'ranks'}"

    def _repaired(self) -> str:
        back = self._pool.repair()
        if not back:
            return "no rank is missing"
        return f"{format_ranks(back)} {'is' if len(back) == 1 else 'are'} back, with empty memory"

    def _restarted(self, ranks: Sequence[int]) -> str:
        self._pool.restart(ranks)
        return f"{format_ranks(ranks)} started again, with empty memory"
