"""The report of a failed cell, and the exceptions that make a notebook's cell fail as its ranks did.

The cause comes first and whole; the consequences are folded to one line for each group of ranks.
"""

from __future__ import annotations

import re
from typing import TypeVar

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import compact_ranks, format_ranks, visible, visible_coloured
from hvdlab.kernel_ext.notebook.cells.results import CellResults, RootCause, one_line
from hvdlab.kernel_ext.notebook.elastic import why_unknown
from hvdlab.kernel_ext.notebook.output.stack_text import grouped
from hvdlab.kernel_ext.wire.cells import CellError

# Bold, and not red: notebooks show errors on red, and on dark red in their dark themes.
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NOTE = re.compile(r"\[decision \d+ of the coordinator\]")
"""The line of a traceback that names the coordinator's decision."""


def report(results: CellResults, *, colours: bool = True) -> list[str]:
    """Return lines (with ANSI colours, unless ``colours`` is False) that say why the cell failed; empty if it didn't."""
    cause = results.root_cause
    if cause is None:
        return []
    lines = _coloured(results, cause)
    return [visible_coloured(line if colours else _ANSI.sub("", line)) for line in lines]


def _coloured(results: CellResults, cause: RootCause) -> list[str]:
    stopped_by_user = cause.ename == "KeyboardInterrupt" and results.interrupted
    out_of_time = cause.ename == "TimeoutError" and results.timed_out
    stopped = cause.blameless or stopped_by_user or out_of_time
    lines = [_headline(results, cause), *(_frames(cause) if stopped else cause.traceback)]
    others = _consequences(results, cause)
    if others and cause.traceback:
        lines.append("")
    lines += others + _came_later(results) + _replacing(results) + _recorded(results, cause)
    return lines + _story(results)


def _story(results: CellResults) -> list[str]:
    """Return the coordinator's decisions that led to the failure."""
    if not results.story:
        return []
    return ["", "the coordinator's decisions:", *(f"  {visible(line)}" for line in results.story)]


def _replacing(results: CellResults) -> list[str]:
    """Return how ranks that died are replaced."""
    if not results.deaths or not results.replaceable:
        return []
    return ["", f"`%hvd_pool repair` replaces {format_ranks(tuple(results.deaths))}"]


def _came_later(results: CellResults) -> list[str]:
    """Return why names are unknown on ranks that were started after the cells which made them."""
    unknown = {rank: error.evalue for rank, error in results.errors.items() if error.ename == "NameError"}
    # A name that ranks lack which were there from the beginning was made nowhere: newcomers lack nothing by coming late.
    nowhere = {name for rank, name in unknown.items() if rank not in results.newcomers}
    unknown = {rank: name for rank, name in unknown.items() if name not in nowhere}
    why = why_unknown(results.newcomers, list(unknown))
    return ["", why] if why else []


def _recorded(results: CellResults, cause: RootCause) -> list[str]:
    """Return the last recorded steps of a rank that failed, and for other ranks the first step that was not finite."""
    first = next((rank for rank in cause.shown or cause.ranks if rank in results.errors), None)
    if first is None or not results.errors[first].recorded:
        first = next((rank for rank, error in results.errors.items() if error.recorded), None)
    wrong = {r: e.wrong for r, e in results.errors.items() if e.wrong}
    if first is None or (results.errors[first].interrupted and not wrong):
        return []
    lines = ["", f"{_BOLD}The last steps of rank {first}:{_RESET}"]
    lines += [f"  {visible(line)}" for line in results.errors[first].recorded]
    wrong.pop(first, None)
    if wrong:
        lines += ["First steps that are not finite:", *(f"  {line}" for line in grouped(wrong))]
    return [*lines, "`%hvd_replay` brings such a batch to the notebook."]


def _headline(results: CellResults, cause: RootCause) -> str:
    if cause.blameless:
        return f"{_BOLD}{_in_lines(cause.evalue)}{_RESET}"
    if cause.ename == "RankDied":
        return "\n".join([f"{_BOLD}{cause.evalue}{_RESET}", *_details(results, cause)])
    if cause.ename == "KeyboardInterrupt" and results.interrupted:
        return f"{_BOLD}KeyboardInterrupt: {cause.evalue}{_where(cause)}{_RESET}"
    if results.timed_out and cause.ename == "TimeoutError":
        return f"{_BOLD}TimeoutError: {cause.evalue}{_where(cause)}{_RESET}"
    how = "" if len(cause.ranks) == 1 else " with the same error"
    return f"{_BOLD}{format_ranks(cause.ranks)} failed{how}:{_RESET}"


def _details(results: CellResults, cause: RootCause) -> list[str]:
    """Return further facts about the ranks that died."""
    details = {rank: results.deaths[rank].detail for rank in cause.ranks if results.deaths[rank].detail}
    if len(cause.ranks) == 1:
        return [f"  {visible(detail)}" for detail in details.values()]
    return [f"  {line}" for line in grouped(details)]


def _where(cause: RootCause) -> str:
    if not cause.traceback:
        return ""
    shown = cause.shown or cause.ranks[:1]
    if len(shown) == len(cause.ranks):
        return " here:"
    return f"; {format_ranks(shown)} {'was' if len(shown) == 1 else 'were'} here:"


def _in_lines(text: str) -> str:
    """Return a deadlock's ranks one below the other; other sentences as they are."""
    head, colon, places = text.partition(": ")
    if not head.startswith("deadlock") or not colon:
        return text
    return f"{head}:\n  " + places.replace("; ", "\n  ")


def _frames(cause: RootCause) -> list[str]:
    """Return the traceback without its first lines and its last one, which would repeat the headline."""
    first = next(
        (i for i, line in enumerate(cause.traceback) if "Traceback (most recent call last)" in line), -1
    )
    frames = list(cause.traceback[first + 1 :])
    while frames and _NOTE.match(_ANSI.sub("", frames[-1])):
        del frames[-1]
    if frames and _ANSI.sub("", frames[-1]).startswith((f"{cause.ename}:", "KeyboardInterrupt:")):
        del frames[-1]
    return [frame.rstrip("\n") for frame in frames]


def _consequences(results: CellResults, cause: RootCause) -> list[str]:
    lines = [
        visible(death.line)
        for death in results.deaths.values()
        if not (cause.ename == "RankDied" and death.rank in cause.ranks)
    ]
    folded: dict[str, list[int]] = {}
    for rank, error in results.errors.items():
        if rank not in (cause.shown or cause.ranks):
            folded.setdefault(_one_line(results, rank, error), []).append(rank)
    lines += [f"{format_ranks(ranks)}: {visible(line)}" for line, ranks in folded.items()]
    return lines + _given_up(results)


def _given_up(results: CellResults) -> list[str]:
    """Which ranks were given up, where they are, and what the user can do."""
    late = tuple(results.unanswered)
    if not late:
        return []
    if results.replaceable:
        remedy = f"`%hvd_pool restart {compact_ranks(late)}` replaces {'it' if len(late) == 1 else 'them'}"
    else:
        remedy = "`%hvd_pool stop` ends the pool"
    if others := [rank for rank in results.ranks if rank not in late]:
        remedy += f", `--ranks {compact_ranks(others)}` leaves {'it' if len(late) == 1 else 'them'} out"
    lines = [f"{format_ranks(late)}: no answer to the interrupt, not waited for any longer; {remedy}"]
    return lines + [f"  {line}" for line in grouped(results.unanswered)]


def _one_line(results: CellResults, rank: int, error: CellError) -> str:
    if error.interrupted:
        return f"interrupted at {error.site}" if error.site else "interrupted"
    if error.aborted and error.collective:
        return f"stopped in {error.collective}{_because(results, rank, error)}"
    return one_line(error)


def _because(results: CellResults, rank: int, error: CellError) -> str:
    origin = sorted(results.origin(rank))
    dead = [rank for rank in origin if rank in results.deaths]
    failed = [rank for rank in origin if rank in results.errors and rank not in dead]
    if dead:
        return f" because {format_ranks(dead)} died"
    if failed:
        interrupted = all(results.errors[rank].interrupted for rank in failed)
        was = "was" if len(failed) == 1 else "were"
        return f" because {format_ranks(failed)} " + (f"{was} interrupted" if interrupted else "failed")
    return f": {error.why}" if error.why else ""


F = TypeVar("F", bound=BaseException)


class CellFailed(HvdlabError):
    """A cell failed on at least one rank.

    It is raised as a subclass that bears the name of the root cause, so that tools which read only the name and text
    of an error (nbclient, papermill, test runners) see ``ValueError: bad`` as if the cell had run in the kernel.

    Attributes:
        results: Everything the ranks left behind.
    """

    def __init__(self, results: CellResults, *, colours: bool = True) -> None:
        self.results = results
        self._colours = colours
        cause = results.root_cause
        super().__init__(cause.evalue if cause is not None else "")

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of a traceback through our own frames."""
        return report(self.results, colours=self._colours)


class CellInterrupted(KeyboardInterrupt):
    """The user interrupted a cell. A KeyboardInterrupt, so that nothing but the top level catches it."""

    def __init__(self, results: CellResults, *, colours: bool = True) -> None:
        self.results = results
        self._colours = colours
        cause = results.root_cause
        super().__init__(cause.evalue if cause is not None else "")

    def _render_traceback_(self) -> list[str]:
        return report(self.results, colours=self._colours)


def failure_of(results: CellResults, *, colours: bool = True) -> CellFailed | CellInterrupted | None:
    """Return the exception to raise for these results, or None if all is well; ``colours`` is for the text that IPython shows."""
    cause = results.root_cause
    if cause is None:
        return None
    if results.interrupted and cause.ename == "KeyboardInterrupt":
        return _named(CellInterrupted, cause.ename)(results, colours=colours)
    return _named(CellFailed, cause.ename)(results, colours=colours)


def _named(base: type[F], name: str) -> type[F]:
    """Return a subclass under the name of the cause."""
    # type() would refuse a name with a NUL or half a character in it.
    found: type[F] = type(visible(name), (base,), {"__module__": base.__module__})  # pyright: ignore[reportAssignmentType]
    return found
