"""Completion of magics' options and of code in ``%%hvd_run`` cells, and inspection there, from the variables of the first rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from hvdlab.collectives.errors import HvdlabError
from hvdlab.magics.arguments import PARSERS, Values
from hvdlab.magics.notebook_pool import NotebookPool
from hvdlab.magics.run_magics import AutoRun

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool

PATIENCE = 2.0
"""Seconds that an idle rank has to answer; its first completion imports jedi."""

_HEAD = re.compile(r"\s*%%hvd_(?:run|rank)\b[^\n]*\n")

_OPTIONS = re.compile(r"\s*%%?(hvd_\w+)((?:\s+\S+)*\s+)(\S*)$")
"""Matches a line of a magic of ours up to the cursor: its name, the words before, and the word to complete."""


def rank_source(cell: str, offset: int, *, everywhere: bool = False) -> tuple[str, int] | None:
    """Return the part of a cell that runs on ranks, and the cursor in it; None if the cursor is not in such a part.

    Args:
        cell: The notebook's cell.
        offset: The cursor, in characters from the cell's beginning.
        everywhere: Whether cells without a magic run on ranks, too (``%autohvd``).
    """
    head = _HEAD.match(cell)
    begin = head.end() if head else 0
    if offset < begin or (head is None and (not everywhere or cell.lstrip().startswith("%%"))):
        return None
    return cell[begin:], offset - begin


class RankCompleter:
    """Matchers for IPython's completer, and an inspector for the kernel.

    Args:
        session: Has the pool.
        auto: The transformer of ``%autohvd``: while it is on, cells without a magic run on ranks, too.
    """

    def __init__(self, session: NotebookPool, auto: AutoRun) -> None:
        self._session, self._auto = session, auto

        @context_matcher(identifier="hvdlab.rank", priority=1000)  # type: ignore[untyped-decorator]  # IPython's
        def match(context: CompletionContext) -> SimpleMatcherResult:
            return self._match(context)

        @context_matcher(identifier="hvdlab.options", priority=1001)  # type: ignore[untyped-decorator]  # IPython's
        def match_options(context: CompletionContext) -> SimpleMatcherResult:
            return self._match_options(context)

        self.matchers = (match_options, match)
        self._kernel_inspect: Callable[..., Any] | None = None

    def load(self) -> None:
        shell = self._session.shell
        if shell.Completer is not None:
            shell.Completer.custom_matchers.extend(self.matchers)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None and not self._session.ranks_by_default:  # that kernel asks ranks by itself
            self._kernel_inspect = kernel.do_inspect
            kernel.do_inspect = self._inspect

    def unload(self) -> None:
        shell = self._session.shell
        for matcher in self.matchers:
            if shell.Completer is not None and matcher in shell.Completer.custom_matchers:
                shell.Completer.custom_matchers.remove(matcher)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None and self._kernel_inspect is not None:
            kernel.do_inspect = self._kernel_inspect
            self._kernel_inspect = None

    def _match_options(self, context: CompletionContext) -> SimpleMatcherResult:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        found = _OPTIONS.match(line)
        parser = PARSERS.get(found[1]) if found is not None else None
        if found is None or parser is None:
            return SimpleMatcherResult(completions=[])
        candidates = parser.candidates([*found[2].split(), found[3]])
        words = self._values(candidates) if isinstance(candidates, Values) else candidates
        # Several ranks are a list: `0,2` is completed behind its last comma.
        fragment = found[3].rpartition(",")[2] if candidates is Values.RANKS else found[3]
        matches = [word for word in words if word.startswith(fragment)]
        return SimpleMatcherResult(
            completions=[SimpleCompletion(word, type="magic") for word in matches],
            matched_fragment=fragment,
            # Elsewhere on such a line is code, as behind the options of %hvd_run, which IPython completes.
            suppress=bool(matches) or found[3].startswith("-"),
        )

    def _values(self, kind: Values) -> list[str]:
        """Return the values that there are now. Asks the ranks for names, within the pool's limit."""
        if kind is Values.OWN_NAMES:
            return sorted(name for name in self._session.shell.user_ns if not name.startswith("_"))
        if kind is Values.POOLS:
            from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry

            return sorted(kept.name for kept in KeptPoolRegistry().all())
        pool = self._session.pool
        if pool is None or pool.state not in ("idle", "running"):
            return []
        if kind is Values.RANKS:
            return [str(rank) for rank in pool.ranks]
        try:
            names = pool.names()
        except HvdlabError:  # the pool broke down; completing is not the place to say so
            return []
        return sorted({name for found in names.values() for name in found.variables})

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        lines = context.full_text.split("\n")
        offset = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
        found = self._ask(
            context.full_text,
            offset,
            lambda pool, source, cursor: pool.complete(source, cursor, timeout=PATIENCE),
        )
        if found is None or not found[0].matches:
            return SimpleMatcherResult(completions=[])
        answer, source, cursor = found
        types = answer.types or ("",) * len(answer.matches)
        return SimpleMatcherResult(
            completions=[
                SimpleCompletion(text, type=kind) for text, kind in zip(answer.matches, types, strict=True)
            ],
            matched_fragment=source[answer.start : cursor],
            suppress=True,
        )

    def _inspect(self, code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **kwargs: Any) -> Any:
        found = self._ask(
            code,
            cursor_pos,
            lambda pool, source, cursor: pool.inspect(source, cursor, detail_level, timeout=PATIENCE),
        )
        if found is not None and found[0].found:
            return {"status": "ok", "found": True, "data": found[0].data, "metadata": {}}
        assert self._kernel_inspect is not None
        return self._kernel_inspect(code, cursor_pos, detail_level, *args, **kwargs)

    def _ask(
        self, cell: str, offset: int, ask: Callable[[Pool, str, int], Any]
    ) -> tuple[Any, str, int] | None:
        pool = self._session.pool
        at = rank_source(cell, offset, everywhere=self._auto.on)
        if pool is None or at is None or pool.state not in ("idle", "running"):
            return None
        try:
            answer = ask(pool, *at)
        except HvdlabError:  # the pool broke down; completing is not the place to say so
            return None
        return None if answer is None else (answer, *at)
