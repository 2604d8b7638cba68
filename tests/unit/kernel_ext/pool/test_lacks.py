"""Variables that a restarted rank lacks."""

from __future__ import annotations

from hvdlab.kernel_ext.notebook.elastic import missing_names_notice, restarted_notice
from hvdlab.kernel_ext.wire.status import UserNames


def names(variables: str, modules: str = "") -> UserNames:
    return UserNames(0, tuple(variables.split()), tuple(modules.split()))


def test_what_the_others_have_is_listed_in_order() -> None:
    found = {0: names("model opt x", "np torch"), 1: names("model y opt", "np"), 3: names("")}
    assert restarted_notice(found, [3], 1.24) == (
        "rank 3 is back (1.2 s); it lacks model, opt, x, y and the modules np, torch: `%hvd_pool sync 3` brings it all "
        "that, as `%%hvd_run --sync` does before its cell, or run your set-up cells on it with `%%hvd_rank 3`"
    )


def test_several_ranks_lack_what_one_of_them_lacks() -> None:
    found = {0: names("a b", "np"), 1: names("a"), 2: names("a b", "np")}
    assert missing_names_notice(found, [1, 2]).startswith(
        "they lack b and the module np: `%hvd_pool sync 1,2` brings them"
    )


def test_nothing_is_said_if_nothing_is_lacking_or_nobody_is_left() -> None:
    assert restarted_notice({0: names(""), 1: names("")}, [1], 0.5) == "rank 1 is back (0.5 s)"
    assert missing_names_notice({0: names("a")}, [0]) == ""


def test_a_rank_that_did_not_tell_lacks_everything() -> None:
    assert missing_names_notice({0: names("a")}, [1]).startswith("it lacks a:")


def test_long_lists_are_cut() -> None:
    found = {0: names(" ".join(f"v{i}" for i in range(30))), 1: names("")}
    assert "v11 and 18 more: `%hvd_pool sync 1`" in missing_names_notice(found, [1])
