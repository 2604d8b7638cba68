"""What a pool can find out about the variables of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.inspect.diff import diff
from hvdlab.kernel_ext.inspect.native import NativeStacks, native_stacks
from hvdlab.kernel_ext.inspect.overview import BUDGET, Overview, TensorTable
from hvdlab.kernel_ext.inspect.result import Diff
from hvdlab.kernel_ext.inspect.special import SPECIAL
from hvdlab.kernel_ext.questions import Answer
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.compare import AskTensors, AskVariables, AskView, Tensors, Variables, VariableView
from hvdlab.kernel_ext.wire.status import Names

if TYPE_CHECKING:
    from hvdlab.kernel_ext.base import PoolBase

LOOK_WITHIN = 7.0
"""Seconds that the pool waits for ranks that look at something; they give up by themselves before that."""


class Looking:
    """The part of a pool that looks into ranks; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _base: PoolBase

    def diff(self, name: str = "", ranks: Sequence[int] | None = None, *, special: str = "") -> Diff:
        """Compare a variable or expression over these ranks (by default all), after what they are running.

        Ranks make the fingerprints and compare the elements; only the result comes to this process.

        Args:
            name: The expression.
            ranks: The ranks to compare; by default all.
            special: ``rng`` (states of random numbers) or ``environment`` (versions and settings), instead of a name.

        Raises:
            InvalidRequestError: Not exactly one of ``name`` and ``special`` was given, or a rank is lost or does not exist.
            HvdlabError: A rank was lost meanwhile.
        """
        if bool(name) == bool(special) or special not in ("", *SPECIAL):
            raise InvalidRequestError(
                f"diff takes the name of a variable, or special= with one of {', '.join(SPECIAL)}"
            )
        questions = self._base.runs.questions
        return diff(questions, name, self._chosen(ranks), special=special, near=self._near())

    def view(self, expression: str, ranks: Sequence[int] | None = None) -> dict[int, VariableView]:
        """Rank to a description of an expression's value there, of these ranks (by default all), also while they run a cell.

        Ranks that do not answer are missing.
        """
        answers = self._look(lambda ticket: AskView(ticket, expression), ranks)
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, VariableView)}

    def variables(self, ranks: Sequence[int] | None = None) -> Overview:
        """The user's variables on these ranks (by default all), and where they differ; also while cells run."""
        chosen = self._chosen(ranks)
        answers = self._look(lambda ticket: AskVariables(ticket, BUDGET), chosen)
        found = {rank: answer for rank, answer in answers.items() if isinstance(answer, Variables)}
        return Overview(found, tuple(rank for rank in chosen if rank not in found))

    def tensors(self, ranks: Sequence[int] | None = None, *, most: int = 20) -> TensorTable:
        """The ``most`` largest arrays and tensors on each of these ranks (by default all), also while cells run."""
        answers = self._look(lambda ticket: AskTensors(ticket, most), ranks)
        return TensorTable({rank: answer for rank, answer in answers.items() if isinstance(answer, Tensors)})

    def native(self, ranks: Sequence[int] | None = None) -> NativeStacks:
        """Where ranks of this host (by default all) are, with the frames below Python. Takes seconds.

        Raises:
            InvalidRequestError: py-spy is not installed, or none of these ranks is on this host.
        """
        chosen, near = self._chosen(ranks), self._near()
        pids = {m.rank: m.pid for m in self._base.client.membership().members if m.rank in chosen}
        here = {rank: pid for rank, pid in sorted(pids.items()) if rank in near}
        if not here:
            raise InvalidRequestError("native frames can be read of ranks on this host only")
        return native_stacks(here)

    def _look(self, make: Callable[[int], Payload], ranks: Sequence[int] | None) -> dict[int, Answer]:
        return dict(
            sorted(self._base.runs.questions.ask(make, self._chosen(ranks), Deadline(LOOK_WITHIN)).items())
        )

    # -- what the rest of a pool has --------------------------------------------------------------------------------

    def names(self, ranks: Sequence[int] | None = None) -> dict[int, Names]:
        raise NotImplementedError

    def pull(self, name: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        raise NotImplementedError

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        raise NotImplementedError

    def _near(self) -> set[int]:
        raise NotImplementedError
