"""What a pool can tell about the variables of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.inspect.diff import diff
from hvdlab.kernel_ext.inspect.result import Diff
from hvdlab.kernel_ext.inspect.special import SPECIAL

if TYPE_CHECKING:
    from hvdlab.kernel_ext.base import PoolBase


class Looking:
    """The part of a pool that looks into ranks; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _base: PoolBase

    def diff(self, name: str = "", ranks: Sequence[int] | None = None, *, special: str = "") -> Diff:
        """Compare a variable or expression over these ranks (by default all), after what they are running.

        Fingerprints are made and elements are compared on the ranks; only what is told comes here.

        Args:
            name: The expression.
            ranks: Where.
            special: ``rng`` (states of random numbers) or ``environment`` (versions and settings), instead of a name.

        Raises:
            InvalidRequestError: Neither a name nor something special was given, or there is no such rank.
            HvdlabError: A rank was lost meanwhile.
        """
        if bool(name) == bool(special) or special not in ("", *SPECIAL):
            raise InvalidRequestError(
                f"diff takes the name of a variable, or special= with one of {', '.join(SPECIAL)}"
            )
        questions = self._base.runs.questions
        return diff(questions, name, self._chosen(ranks), special=special, near=self._near())

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        raise NotImplementedError

    def _near(self) -> set[int]:
        raise NotImplementedError
