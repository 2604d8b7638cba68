"""Names of the user's variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.kernel_ext.rank.completion import user_names

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Rank


def test_only_what_the_user_made_is_told(rank: Rank) -> None:
    before = user_names(rank.shell, 1)
    rank.run("import math\nx = 1\n_hidden = 2\ndef f(): pass\nx = 3")
    found = user_names(rank.shell, 1)
    assert found.variables[len(before.variables) :] == ("x", "f")
    assert found.modules[len(before.modules) :] == ("math",)
