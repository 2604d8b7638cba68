"""Models that are no longer the same on all ranks: the error, and what the ranks exchange for its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Never

from hvdlab.bindings.objects import allgather_object
from hvdlab.collectives import context
from hvdlab.collectives.errors import HvdlabError, format_ranks
from hvdlab.collectives.fingerprint import fingerprint
from hvdlab.collectives.process_sets import ProcessSet
from hvdlab.collectives.text import visible


class DivergenceError(HvdlabError):
    """The ranks' models differ. Raised on all ranks, with the same text; nothing was changed.

    Attributes:
        step: Steps that had been taken when it was noticed.
        since: The step after which the models first differed, as far as that is known.
        groups: Ranks whose models are alike, the most numerous first.
        tensors: Names of the tensors that differ.
    """

    def __init__(
        self, step: int, since: int | None, groups: Sequence[tuple[int, ...]], tensors: Sequence[str]
    ) -> None:
        self.step, self.since, self.groups, self.tensors = step, since, tuple(groups), tuple(tensors)
        super().__init__(step, since, self.groups, self.tensors)

    def _text(self) -> str:
        most, *others = self.groups
        if len(most) == 1:
            who = f"all of {format_ranks([rank for group in self.groups for rank in group])} have models of their own"
        else:
            odd = sorted(rank for group in others for rank in group)
            verb = "does" if len(odd) == 1 else "do"
            who = f"{format_ranks(most)} agree and {format_ranks(odd)} {verb} not"
        more = len(self.tensors) - 1
        tensors = (
            f"`{visible(self.tensors[0])}`" + (f" and {more} more" if more else "")
            if self.tensors
            else "its tensors"
        )
        if self.since == 0:
            when = "before the first step; hvd.broadcast_parameters(), with Keras hvd.broadcast_variables(), makes them alike"
        elif self.since is not None:
            when = f"since step {self.since}"
        else:
            when = f"noticed after step {self.step}"
        return f"the ranks' models differ in {tensors}, {when}: {who}. `%hvd_diff` shows by how much."


def tell_divergence(
    name: str,
    process_set: ProcessSet,
    step: int,
    digests: Mapping[str, bytes],
    samples: Sequence[tuple[int, bytes]],
) -> Never:
    """Gather from all ranks what the error's text needs, and raise :class:`DivergenceError`; called by all ranks.

    Args:
        name: Name of the comparison, equal on all ranks.
        process_set: The ranks whose models were compared.
        step: Steps that had been taken.
        digests: Fingerprint of each tensor of the model, by its name.
        samples: Fingerprint of some elements after each of the last steps, with the number of the step.
    """
    rank = context.engine().rank
    gathered = allgather_object((rank, dict(digests), list(samples)), f"{name}.detail", process_set)
    groups: dict[bytes, list[int]] = {}
    for rank, by_name, _ in gathered:
        whole = fingerprint(*(part for label, d in by_name.items() for part in (label.encode(), d)))
        groups.setdefault(whole, []).append(rank)
    all_names = dict.fromkeys(label for _, by_name, _ in gathered for label in by_name)
    odd = [label for label in all_names if len({by_name.get(label) for _, by_name, _ in gathered}) > 1]
    ordered = sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks))
    raise DivergenceError(step, _since([dict(each) for _, _, each in gathered], step), ordered, odd)


def _since(samples: Sequence[dict[int, bytes]], step: int) -> int | None:
    """The first step at which the samples differ; 0 if no step was taken, None if no step common to all ranks differs."""
    if step == 0:
        return 0
    common = sorted(set(samples[0]).intersection(*samples[1:]))
    differing = [n for n in common if len({sample[n] for sample in samples}) > 1]
    if not differing:
        return None
    return differing[0]
