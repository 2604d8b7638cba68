"""Results of a run: a value or an error per rank, the mime bundle of the values, and the cause if it failed."""

from __future__ import annotations

import base64
import html
import importlib
import io
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, overload

from hvdlab.collectives.text import compact_ranks, format_ranks, visible, visible_lines
from hvdlab.kernel_ext.notebook.elastic import UnsyncedRank
from hvdlab.kernel_ext.notebook.output.stack_text import crash_lines
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, Display

Groups = Sequence[tuple[tuple[int, ...], Mapping[str, Any]]]

_RICH = ("text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/latex")
_LABEL = '<div class="hvd-output" style="opacity: 0.65; font-size: 0.85em; margin: 0.3em 0 0.1em">{}</div>'


MOST_LINES = 12
"""Lines that are shown of one value."""

MOST_LINES_IN_ALL = 120
"""Lines that are shown of all values together, if that leaves each at least :data:`FEWEST_LINES`."""

FEWEST_LINES = 3
LONGEST_LINE = 1000


@dataclass(frozen=True, slots=True)
class ValueNotSent:
    """A value that stayed on its rank.

    Attributes:
        why: The reason, with the remedy.
        large: Whether the value is too large, so that its text is mostly an abridged one.
    """

    why: str
    large: bool = False


def text_of(
    groups: Groups, width: int = 0, *, name: str = "_", unsent: Mapping[int, ValueNotSent] | None = None
) -> str:
    """Return one block for each group of equal values, labelled by rank; long ones are cut.

    Args:
        groups: The values, as mime bundles.
        width: Characters of the labels, at least.
        name: The variable that has the values whole.
        unsent: Rank to its value, for values that ``name`` lacks.
    """
    most = max(FEWEST_LINES, min(MOST_LINES, MOST_LINES_IN_ALL // max(1, len(groups))))
    rows = []
    for ranks, data in groups:
        hint, missing = _whereabouts(ranks, name, unsent or {})
        text = shortened(str(data.get("text/plain", "")), most, hint)
        if missing is not None and missing.large and not text.endswith(hint):
            text += f"\n({hint})"
        rows.append((f"[{compact_ranks(ranks)}]", text))
    width = max([width, *(len(label) + 1 for label, _ in rows)])
    return "\n".join(label.ljust(width) + text.replace("\n", "\n" + " " * width) for label, text in rows)


def _whereabouts(
    ranks: Sequence[int], name: str, unsent: Mapping[int, ValueNotSent]
) -> tuple[str, ValueNotSent | None]:
    """Return the words that say where a value of these ranks is whole, and why it is not in ``name`` if it is not."""
    sent = next((rank for rank in ranks if rank not in unsent), None)
    if sent is not None:
        return f"`{name}[{sent}]` has all", None
    missing = unsent[ranks[0]]
    return f"the value was not sent: {missing.why}", missing


def shortened(text: str, most: int, hint: str) -> str:
    """Return ``text`` with at most ``most`` lines, the last of which says how much is missing and ends in ``hint``."""
    lines = text.split("\n")
    cut = any(len(line) > LONGEST_LINE for line in lines[:most])
    if len(lines) <= most and not cut:
        return text
    kept = lines if len(lines) <= most else lines[: most - 1]
    shown = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in kept]
    left = len(lines) - len(kept)
    if left:
        shown.append(f"… {left} more lines; {hint}")
    else:
        shown.append(f"… cut; {hint}")
    return "\n".join(shown)


def html_of(groups: Groups, *, unsent: Mapping[int, ValueNotSent] | None = None) -> str | None:
    """Return the groups as HTML, with tables and pictures; None if no value has any.

    Args:
        groups: The values, as mime bundles.
        unsent: Rank to its value, for values that stayed on their ranks.
    """
    if not any(kind in data for _, data in groups for kind in _RICH):
        return None
    blocks = []
    for ranks, data in groups:
        hint, missing = _whereabouts(ranks, "_", unsent or {})
        below = _LABEL.format(html.escape(hint)) if missing is not None and missing.large else ""
        blocks.append(_LABEL.format(format_ranks(ranks)) + _block(data) + below)
    return in_output("\n".join(blocks))


def in_output(content: str) -> str:
    """Return HTML that JupyterLab aligns with the text output of cells: labextension/style/base.css knows the class."""
    return f'<div class="hvd-output">{content}</div>'


def label_html(ranks: Sequence[int]) -> str:
    """Return the small dim line above a rank's display."""
    return _LABEL.format(format_ranks(ranks))


def _block(data: Mapping[str, Any]) -> str:
    if "text/html" in data:
        return str(data["text/html"])
    if "image/svg+xml" in data:
        # As a picture, whose scripts no browser runs; it would run those of an element within the page.
        svg = data["image/svg+xml"]
        return _picture("image/svg+xml", svg if isinstance(svg, bytes) else str(svg).encode())
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return _picture(kind, data[kind])
    return f"<pre>{html.escape(str(data.get('text/plain', '')))}</pre>"


def _picture(kind: str, content: str | bytes) -> str:
    """Return an element for bytes, or for a text in base64."""
    encoded = base64.b64encode(content).decode() if isinstance(content, bytes) else content.replace("\n", "")
    return f'<img src="data:{kind};base64,{html.escape(encoded)}">'


_WAITED = re.compile(r"ranks? [\d,-]+ waited; ")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_MODULE_BY_NAME = ("cloudpickle.cloudpickle", "subimport")
"""The function by which cloudpickle's pickles refer to a module."""


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A rank that ended during the cell; ``when`` as in :class:`~hvdlab.kernel_ext.wire.cells.CellError`.

    ``tail`` has the last lines of its standard error that were left unread, such as a crash report, ``detail`` more that is
    known, such as its peak memory.
    """

    rank: int
    reason: str
    when: int
    tail: str = ""
    detail: str = ""

    @property
    def line(self) -> str:
        """Return the text in one line, as much as fits."""
        return f"rank {self.rank} died: {self.reason}" + (f"; {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class RootCause:
    """Why a cell failed.

    Attributes:
        ranks: The ranks it happened on (several if they failed alike).
        ename: Class of the error; ``RankDied`` for a death.
        evalue: Its text.
        traceback: Coloured lines; for a death, the place where the rank was, as far as it is known.
        blameless: The text is a sentence about all of them, and none of these ranks is to blame: they were stopped.
        shown: Those of the ranks that the traceback holds for, if not for all.
    """

    ranks: tuple[int, ...]
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    blameless: bool = False
    shown: tuple[int, ...] = ()


class NoValue(IndexError):
    """A rank's value can not be had. An ``IndexError``, as of any sequence; notebooks show just the sentence."""

    def __str__(self) -> str:
        return visible_lines(super().__str__())

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class ImportDisplay(Protocol):
    """Display of the imports that values need."""

    def importing(self, module: str) -> AbstractContextManager[None]:
        """Show that this module is imported until the context is left, by an exception if the import fails."""


class ValueUnpickler(pickle.Unpickler):
    """Unpickler that shows which modules it imports: torch takes seconds, for a tensor of three elements too.

    Args:
        stream: The pickle.
        display: Shows the imports.
        buffers: The buffers that belong to the pickle, in its order.
    """

    def __init__(
        self, stream: bytes | bytearray, display: ImportDisplay, buffers: Iterable[bytearray] = ()
    ) -> None:
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._display = display

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == _MODULE_BY_NAME:
            return self._find_module
        if module_name in sys.modules:
            return super().find_class(module_name, global_name)
        with self._display.importing(module_name):
            return super().find_class(module_name, global_name)

    def _find_module(self, name: str) -> ModuleType:
        """Return a module that the value refers to, and import it if that was not done yet."""
        if name not in sys.modules:
            with self._display.importing(name):
                importlib.import_module(name)
        return sys.modules[name]


def one_line(error: CellError) -> str:
    """``ValueError: first line of its text``."""
    text = error.evalue.strip().partition("\n")[0]
    return f"{error.ename}: {text}" if text else error.ename


def same_error(a: CellError, b: CellError) -> bool:
    """Return whether two ranks failed alike; addresses in texts may differ."""
    if (a.ename, a.aborted, a.collective, a.culprits) != (b.ename, b.aborted, b.collective, b.culprits):
        return False
    if _plain(a.evalue) != _plain(b.evalue):
        return False
    return (
        a.mismatch
        or a.syntax
        or a.aborted
        or _plain("\n".join(a.traceback)) == _plain("\n".join(b.traceback))
    )


def _plain(text: str) -> str:
    return _ADDRESS.sub("0x", text)


class CellResults(Sequence[Any]):
    """Values of a cell's last expression, by rank: ``results[3]`` is rank 3's, whichever ranks the cell ran on.

    Iterating gives the values in order of rank. Values are unpickled when they are first asked for.

    Args:
        ranks, deaths, unanswered, timed_out, replaceable, newcomers, interrupted, label: As the attributes.
        done: Rank to its report of the cell's end.
        shown: Rank to the last display of its value.
        arrivals: Rank of another host to that host, and to the time here at which its report came.
        stopped: Ranks that the pool interrupted because another rank had failed.
        timeout: Seconds of the time limit; ``None`` if there was none.

    Attributes:
        ranks: The ranks that the cell ran on.
        errors: Rank to error, for ranks where the cell failed.
        deaths: Rank to death, for ranks that ended during the cell.
        interrupted: Whether the user interrupted the cell.
        timed_out: The ranks that still ran when the time limit was reached.
        unanswered: Rank to where it is, for ranks that did not answer an interrupt and were given up.
        replaceable: Whether single ranks of the pool can be started again.
        newcomers: Rank to how it came, for ranks that had come later when the cell began and had nothing of the others'.
        seconds: Rank to run time.
        label: The cell's name, such as ``[7]``.
        name: The variable that users have the results in.
        plain: Whether they are shown as the value itself where all ranks agree, as in a notebook without ranks.
        import_display: Shows which package a value has imported while it is unpickled; None shows nothing.
        story: The coordinator's decisions that led to the failure, in lines, once :meth:`Pool.explain` has asked for them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        done: Mapping[int, CellDone],
        *,
        shown: Mapping[int, Display] | None = None,
        deaths: Mapping[int, RankDeath] | None = None,
        arrivals: Mapping[int, tuple[str, int]] | None = None,
        stopped: set[int] | None = None,
        unanswered: Mapping[int, str] | None = None,
        timed_out: tuple[int, ...] = (),
        timeout: float | None = None,
        replaceable: bool = True,
        newcomers: Mapping[int, UnsyncedRank] | None = None,
        interrupted: bool = False,
        label: str = "",
    ) -> None:
        self.ranks = tuple(ranks)
        self.label, self.name = label, "_"
        self.plain = False
        self.import_display: ImportDisplay | None = None
        self.story: tuple[str, ...] = ()
        self.errors: dict[int, CellError] = {
            r: d.error for r, d in sorted(done.items()) if d.error is not None
        }
        self.deaths: dict[int, RankDeath] = dict(sorted((deaths or {}).items()))
        self.seconds: dict[int, float] = {r: d.seconds for r, d in sorted(done.items())}
        self.interrupted, self.timed_out = interrupted, timed_out
        self.unanswered: dict[int, str] = dict(unanswered or {})
        self.replaceable = replaceable
        self.newcomers: dict[int, UnsyncedRank] = dict(newcomers or {})
        self._timeout = timeout
        self._done = dict(done)
        self._shown = dict(shown or {})
        self._arrivals = dict(arrivals or {})
        self._stopped = set(stopped or ())
        self._values: dict[int, Any] = {}

    # -- success and failure ------------------------------------------------------------------------------------------

    @property
    def ok(self) -> bool:
        """Return whether the cell ended without error on every rank."""
        return not (self.errors or self.deaths or self.interrupted or self.timed_out or self.unanswered)

    @property
    def root_cause(self) -> RootCause | None:
        """Return the failure that came first and that no other rank caused; None if all is well."""
        if self.ok:
            return None
        # An abort, or an interrupt by the pool, follows from the failure of another rank, whatever its time.
        own = {r: e for r, e in self.errors.items() if not e.aborted and not self._made_by_us(r, e)}
        times = self.failure_times()
        first = min(own, key=lambda r: (times[r], r), default=None)
        death = min(self.deaths.values(), key=lambda d: (d.when, d.rank), default=None)
        if death is not None and (first is None or death.when <= times[first]):
            lines = tuple(crash_lines(death.tail))
            alike = [
                d.rank
                for d in self.deaths.values()
                if d.reason == death.reason and (d is death or tuple(crash_lines(d.tail)) == lines)
            ]
            reason = death.reason if len(alike) == 1 else death.reason.replace("its ", "their ", 1)
            said = f"{format_ranks(alike)} died: {reason}"
            return RootCause(tuple(alike), "RankDied", said, lines)
        if first is not None:
            return self._cause_of(first)
        if self.timed_out:
            return self._timeout_cause()
        if self.interrupted:
            return self._interrupt_cause()
        first = min(self.errors, key=lambda r: (times[r], r), default=None)
        return None if first is None else self._cause_of(first)

    def failure_times(self) -> dict[int, int]:
        """Return when ranks failed, by the clock of this process. Errors have that of their rank's host."""
        # The report that took the least time shows best how far a host's clock is behind. All errors of a host are shifted
        # alike, so that their order stays.
        shifts: dict[str, int] = {}
        for rank, (host, when) in self._arrivals.items():
            if (error := self.errors.get(rank)) is not None:
                shifts[host] = min(shifts.get(host, when - error.when), when - error.when)
        hosts = {rank: host for rank, (host, _) in self._arrivals.items()}
        return {rank: error.when + shifts.get(hosts.get(rank, ""), 0) for rank, error in self.errors.items()}

    def _made_by_us(self, rank: int, error: CellError) -> bool:
        return error.interrupted and rank in self._stopped

    def _cause_of(self, rank: int) -> RootCause:
        error = self.errors[rank]
        if error.cause == "deadlock":
            stuck = tuple(r for r, e in self.errors.items() if (e.cause, e.why) == (error.cause, error.why))
            return RootCause(stuck, error.ename, error.why, blameless=True)
        alike = {r for r, e in self.errors.items() if same_error(e, error)}
        said = error.evalue
        if error.aborted:
            # A rank that came late has an error that names ranks which were only stopped themselves; it waited for
            # the same ranks.
            late = {r for r, e in self.errors.items() if e.aborted and e.collective == error.collective}
            alike |= {r for r in late if self.origin(r) == set(error.culprits)}
            said = _WAITED.sub(f"{format_ranks(tuple(alike))} waited; ", said, count=1)
        ranks = tuple(sorted(alike))
        return RootCause(ranks, error.ename, said, error.traceback, blameless=error.aborted)

    def origin(self, rank: int) -> set[int]:
        """Return the ranks because of which an aborted rank was stopped, not counting those that only were stopped themselves."""
        found: set[int] = set()
        seen, todo = {rank}, [rank]
        while todo:
            for culprit in self.errors[todo.pop()].culprits:
                error = self.errors.get(culprit)
                if error is None or not error.aborted or culprit in self.deaths:
                    found.add(culprit)
                elif culprit not in seen:
                    seen.add(culprit)
                    todo.append(culprit)
        return found

    def _timeout_cause(self) -> RootCause:
        said = f"{format_ranks(self.timed_out)} did not end within {self._timeout or 0:g} s and {_were(self.timed_out)} interrupted"
        shown = self._most_telling([r for r in self.timed_out if r in self.errors])
        return RootCause(self.timed_out, "TimeoutError", said, self._traceback(shown), shown=shown)

    def _interrupt_cause(self) -> RootCause:
        hit = tuple(r for r, e in self.errors.items() if e.interrupted)
        shown = self._most_telling(hit)
        said = f"{format_ranks(hit)} {_were(hit)} interrupted" if hit else "the cell was interrupted"
        return RootCause(hit, "KeyboardInterrupt", said, self._traceback(shown), shown=shown)

    def _most_telling(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Of ranks that were stopped, those in the line of code where fewest were: mostly the others waited for them."""
        by_site: dict[str, list[int]] = {}
        for rank in ranks:
            by_site.setdefault(self.errors[rank].site, []).append(rank)
        groups = sorted(by_site.values(), key=lambda group: len(group))
        return tuple(groups[0]) if groups else ()

    def _traceback(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return self.errors[ranks[0]].traceback if ranks else ()

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def has_values(self) -> bool:
        """Return whether the last expression gave something other than None on some rank."""
        return any([done.has_value for done in self._done.values()])  # noqa: C419  # as there may be many ranks

    @property
    def has_live_values(self) -> bool:
        """Return whether a rank's value is shown by something of the frontend's, such as a widget's view."""
        return any(
            kind.startswith("application/vnd.") for shown in self._shown.values() for kind in shown.data
        )

    def value(self, rank: int) -> Any:
        """Return the value of one rank; None if the last statement was no expression.

        Raises:
            NoValue: The cell did not run on this rank or failed there, or the value could not be sent.
        """
        if rank in self._values:
            return self._values[rank]
        done = self._done.get(rank)
        if done is None or done.error is not None:
            raise NoValue(self._why_missing(rank))
        if done.has_value and done.value is None:
            raise NoValue(f"rank {rank}'s value was not sent: {_why_unsent(done)}")
        # The bytes come from a rank that this pool itself started: code that the user runs with the same rights.
        self._values[rank] = self._unpickled(done.value) if done.value is not None else None
        return self._values[rank]

    def _unpickled(self, raw: bytes) -> Any:
        if self.import_display is None:
            return pickle.loads(raw)  # noqa: S301
        return ValueUnpickler(raw, self.import_display).load()

    def _why_missing(self, rank: int) -> str:
        if rank in self.errors:
            return f"rank {rank} has no value: {self.errors[rank].ename}: {self.errors[rank].evalue}"
        if rank in self.deaths:
            return f"rank {rank} has no value: it died, {self.deaths[rank].reason}"
        return f"the cell did not run on rank {rank}, only on {format_ranks(self.ranks)}"

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            # Bounds are ranks, not positions: of a cell on ranks 2 and 3, `[2:]` has both values.
            wanted = range(*index.indices(self.ranks[-1] + 1))
            return [self.value(r) for r in wanted if r in self.ranks]
        # Negative numbers alone are positions: no rank has such a number.
        return self.value(self.ranks[index] if index < 0 else index)

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Any]:
        return (self.value(rank) for rank in self.ranks)

    def __reversed__(self) -> Iterator[Any]:
        return (self.value(rank) for rank in reversed(self.ranks))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first rank with this value.

        Args:
            value: The value to find.
            start, stop: Ranks to search, as positions of a list.

        Raises:
            ValueError: No rank has this value.
        """
        for rank in self.ranks:
            if rank >= start and (stop is None or rank < stop) and self.value(rank) == value:
                return rank
        raise ValueError(f"no rank has {value!r}")

    # -- display ------------------------------------------------------------------------------------------------------

    def groups(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Return ranks with equal values, and the mime bundle of what they show."""
        found: list[tuple[list[int], dict[str, Any]]] = []
        for rank in self.ranks:
            done = self._done.get(rank)
            if done is None or not done.has_value:
                continue
            bundle = self._shown[rank].data if rank in self._shown else {"text/plain": done.value_repr}
            # By comparison with each group: bundles are dicts, which can't be keys.
            group = next((ranks for ranks, data in found if data == bundle), None)
            if group is None:
                found.append(([rank], bundle))
            else:
                group.append(rank)
        return [(tuple(ranks), data) for ranks, data in found]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any] | None:
        """Return the value's own representations if :attr:`as_one`; None has IPython use the other methods."""
        return dict(self.groups()[0][1]) if self.as_one else None

    @property
    def as_one(self) -> bool:
        """Return whether the results are shown as the one value that all ranks agree on."""
        return self.plain and [ranks for ranks, _ in self.groups()] == [self.ranks]

    def __repr__(self) -> str:
        groups = self.groups() + self._failures()
        if groups:
            return text_of(groups, name=self.name, unsent=self._unsent())
        return f"<no values from {format_ranks(self.ranks)}>"

    def _repr_html_(self) -> str | None:
        return html_of(self.groups() + self._failures(), unsent=self._unsent())

    def _failures(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Return the ranks that failed alike, with a line on their error, in the form of :meth:`groups`."""
        ranks_by_line: dict[str, list[int]] = {}
        for rank in self.ranks:
            if rank in self.errors:
                ranks_by_line.setdefault(f"failed: {visible(one_line(self.errors[rank]))}", []).append(rank)
            elif rank in self.deaths:
                ranks_by_line.setdefault(f"died: {visible(self.deaths[rank].reason)}", []).append(rank)
        return [(tuple(ranks), {"text/plain": line}) for line, ranks in ranks_by_line.items()]

    def _unsent(self) -> dict[int, ValueNotSent]:
        """Return the values that stayed on their ranks."""
        return {
            rank: ValueNotSent(_why_unsent(done), done.too_large)
            for rank, done in self._done.items()
            if done.has_value and done.value is None
        }


def _why_unsent(done: CellDone) -> str:
    return done.value_note or "it can't be pickled; give it a name in the cell and use %hvd_pull"


def _were(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
