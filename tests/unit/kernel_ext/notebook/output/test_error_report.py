"""The cause is shown first and whole; consequences are one line each."""

from __future__ import annotations

import re

from hvdlab.kernel_ext.notebook.cells.results import CellResults, RankDeath
from hvdlab.kernel_ext.notebook.elastic import UnsyncedRank
from hvdlab.kernel_ext.notebook.output.error_report import CellFailed, CellInterrupted, failure_of, report
from hvdlab.kernel_ext.wire.cells import CellDone, CellError


def results(errors: dict[int, CellError | None], **kwargs: object) -> CellResults:
    done = {rank: CellDone("c", error, 0.1) for rank, error in errors.items()}
    deaths = kwargs.get("deaths", {})
    assert isinstance(deaths, dict)
    return CellResults(sorted({*errors, *deaths}), done, **kwargs)  # type: ignore[arg-type]


def shown(found: CellResults) -> list[str]:
    return [re.sub(r"\x1b\[\d+m", "", line) for line in report(found)]


def aborted(when: int, *culprits: int) -> CellError:
    return CellError("AbortedError", "stopped", ("tb",), when, True, "allreduce `grad.fc.weight`", culprits)


BAD = CellError("ValueError", "bad", ("Traceback", "line 4", "ValueError: bad"), 1)


def test_the_failed_rank_comes_first_and_the_others_are_folded() -> None:
    assert shown(results({0: aborted(2, 3), 1: aborted(3, 3), 2: aborted(4, 3), 3: BAD})) == [
        "rank 3 failed:",
        "Traceback",
        "line 4",
        "ValueError: bad",
        "",
        "ranks 0-2: stopped in allreduce `grad.fc.weight` because rank 3 failed",
    ]


def test_a_rank_that_came_late_is_folded_with_the_others() -> None:
    found = shown(results({0: aborted(2, 3), 1: aborted(3, 0, 2, 3), 2: aborted(4, 3), 3: BAD}))
    assert found[-1] == "ranks 0-2: stopped in allreduce `grad.fc.weight` because rank 3 failed"


def test_equal_errors_are_told_once() -> None:
    assert shown(results({0: BAD, 1: BAD})) == ["ranks 0,1 failed with the same error:", *BAD.traceback]


def test_a_second_error_is_one_line() -> None:
    other = CellError("KeyError", "'x'", ("tb",), 9)
    assert shown(results({0: other, 1: BAD}))[-1] == "rank 0: KeyError: 'x'"


def test_a_death_is_the_headline() -> None:
    found = results({0: aborted(9, 2), 1: aborted(9, 2)}, deaths={2: RankDeath(2, "killed by SIGKILL", 3)})
    assert shown(found) == [
        "rank 2 died: killed by SIGKILL",
        "ranks 0,1: stopped in allreduce `grad.fc.weight` because rank 2 died",
        "",
        "`%hvd_pool repair` replaces rank 2",
    ]
    alone = results({}, deaths={2: RankDeath(2, "killed by SIGKILL", 3)}, replaceable=False)
    assert shown(alone) == ["rank 2 died: killed by SIGKILL"]


def test_the_coordinators_decisions_end_the_report() -> None:
    found = results({}, deaths={2: RankDeath(2, "killed by SIGKILL", 3)}, replaceable=False)
    found.story = ("18 died rank 2", "19 aborted `\x1b[2J`")
    assert shown(found) == [
        "rank 2 died: killed by SIGKILL",
        "",
        "the coordinator's decisions:",
        "  18 died rank 2",
        "  19 aborted `\\x1b[2J`",
    ]


def test_the_line_that_names_the_decision_is_no_frame() -> None:
    lines = (
        "Traceback (most recent call last)",
        "line 4",
        "AbortedError: stopped",
        "[decision 7 of the coordinator]",
    )
    stuck = CellError("AbortedError", "stopped", lines, 1, True, "allreduce `x`", (1,), decision=7)
    assert "line 4" in shown(results({0: stuck}))
    assert not any("decision 7" in line or "AbortedError" in line for line in shown(results({0: stuck})))


def unknown(name: str) -> CellError:
    return CellError("NameError", f"name '{name}' is not defined", ("tb",), 3)


def test_only_names_that_ranks_lack_by_coming_late_are_explained_by_that() -> None:
    newcomers = {1: UnsyncedRank("repair", 0.0)}
    nowhere = results({0: unknown("modle"), 1: unknown("modle")}, newcomers=newcomers)
    assert "came later" not in "\n".join(shown(nowhere))
    lacking = results({0: None, 1: unknown("model")}, newcomers=newcomers)
    assert "rank 1 came later, by repair at " in shown(lacking)[-1]
    assert "`%%hvd_run --sync`" in shown(lacking)[-1]
    both = results({0: unknown("modle"), 1: unknown("model")}, newcomers=newcomers)
    assert "rank 1 came later, by repair at " in shown(both)[-1]


def test_results_that_are_looked_at_say_how_ranks_failed() -> None:
    error = CellError("ZeroDivisionError", "division by zero", ("tb",), 3)
    assert repr(results({0: error, 1: error})) == "[0,1] failed: ZeroDivisionError: division by zero"
    found = results({0: error}, deaths={1: RankDeath(1, "killed by SIGKILL", 3)})
    assert repr(found) == "[0] failed: ZeroDivisionError: division by zero\n[1] died: killed by SIGKILL"


def test_an_interrupt_is_told_once() -> None:
    lines = ("----", "KeyboardInterrupt   Traceback (most recent call last)", "line 4", "KeyboardInterrupt: ")
    stop = CellError("KeyboardInterrupt", "", lines, 1, interrupted=True)
    found = results({0: stop, 1: stop}, interrupted=True, stopped={0, 1})
    assert shown(found) == ["KeyboardInterrupt: ranks 0,1 were interrupted here:", "line 4"]
    failure = failure_of(found)
    assert isinstance(failure, CellInterrupted)
    assert type(failure).__name__ == "KeyboardInterrupt"


def test_ranks_stopped_because_of_the_failure_are_folded() -> None:
    stop = CellError("KeyboardInterrupt", "", ("tb",), 5, interrupted=True)
    assert shown(results({0: stop, 1: BAD, 2: stop}, stopped={0, 2}))[-1] == "ranks 0,2: interrupted"


def test_nothing_is_told_when_all_is_well() -> None:
    assert report(results({0: None})) == []
    assert failure_of(results({0: None})) is None


def test_the_exception_bears_the_name_and_text_of_the_cause() -> None:
    failure = failure_of(results({0: None, 1: BAD}))
    assert isinstance(failure, CellFailed)
    assert type(failure).__name__ == "ValueError"
    assert str(failure) == "bad"
    assert failure.results.errors[1] is BAD


STUCK = (
    "deadlock, all wait for each other: "
    "rank 0 in allreduce `a` (cell [7] line 3); rank 1 in broadcast `b` (cell [7] line 5)"
)


def stuck(collective: str, site: str) -> CellError:
    text = f"{collective} ({site}): {STUCK}"
    return CellError("AbortedError", text, ("tb",), 3, True, collective, (0, 1), cause="deadlock", why=STUCK)


def test_a_deadlock_is_one_sentence_that_blames_nobody() -> None:
    found = results(
        {0: stuck("allreduce `a`", "cell [7] line 3"), 1: stuck("broadcast `b`", "cell [7] line 5")}
    )
    assert "\n".join(shown(found)).splitlines() == [
        "deadlock, all wait for each other:",
        "  rank 0 in allreduce `a` (cell [7] line 3)",
        "  rank 1 in broadcast `b` (cell [7] line 5)",
    ]
    assert str(failure_of(found)) == STUCK


def test_a_collective_that_others_skipped_is_the_headline() -> None:
    said = "allreduce `loss` (cell [7] line 2): rank 0 waited; rank 1 finished its cell without it"
    lines = (
        "----",
        "AbortedError      Traceback (most recent call last)",
        "Cell In[7], line 2\n----> 2 hvd.allreduce(x)\n",
        f"AbortedError: {said}",
    )
    error = CellError("AbortedError", said, lines, 1, True, "allreduce `loss`", (1,), cause="cell_ended")
    assert shown(results({0: error, 1: None})) == [said, "Cell In[7], line 2\n----> 2 hvd.allreduce(x)"]


def test_ranks_stopped_in_another_collective_are_told_why_in_few_words() -> None:
    why = "rank 2 finished its cell without it"
    first, second = (
        CellError("AbortedError", f"{c} (x): {why}", (), n, True, c, (2,), cause="cell_ended", why=why)
        for n, c in enumerate(("allreduce `a`", "allreduce `b`"))
    )
    assert shown(results({0: first, 1: second, 2: None}))[-1] == f"rank 1: stopped in allreduce `b`: {why}"


DUMP = """\
terminate called after throwing an instance of 'std::bad_alloc'
Fatal Python error: Aborted

Thread 0x00007efea3fff6c0 (most recent call first):
  File "/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007efeb9c5e740 (most recent call first):
  File "/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "<cell [4] #0a1b2c>", line 5 in f
  File "<cell [4] #0a1b2c>", line 6 in <module>
  File "/site-packages/hvdlab/kernel_ext/rank/cell_executor.py", line 130 in _run_code
  File "<frozen runpy>", line 88 in _run_code

Extension modules: msgspec._core, zmq.backend.cython._zmq (total: 2)
"""


def test_a_crash_is_shown_from_the_crash_to_the_cell() -> None:
    found = results({}, deaths={1: RankDeath(1, "aborted (SIGABRT)", 3, DUMP)})
    assert shown(found) == [
        "rank 1 died: aborted (SIGABRT)",
        "  terminate called after throwing an instance of 'std::bad_alloc'",
        "  __init__.py, line 519, in string_at",
        "  Cell In[4], line 5, in f",
        "  Cell In[4], line 6",
        "",
        "`%hvd_pool repair` replaces rank 1",
    ]


def test_a_deep_crash_is_cut_in_the_middle() -> None:
    frames = "".join(f'  File "<cell [4]>", line {n} in f\n' for n in range(100))
    dump = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n{frames}"
    found = shown(results({}, deaths={1: RankDeath(1, "segmentation fault", 3, dump)}))
    assert len(found) == 12
    assert "  … 92 calls between" in found
    assert found[-3] == "  Cell In[4], line 99, in f"


def test_ranks_that_died_alike_are_told_in_one_line() -> None:
    found = results(
        {0: aborted(9, 2)}, deaths={r: RankDeath(r, "killed by SIGKILL", 3 + r) for r in (1, 2, 4)}
    )
    assert shown(found)[0] == "ranks 1,2,4 died: killed by SIGKILL"
    assert not any("died: killed" in line for line in shown(found)[1:])


def test_of_interrupted_ranks_the_odd_one_is_shown_and_the_others_named() -> None:
    def stop(site: str) -> CellError:
        return CellError(
            "KeyboardInterrupt",
            "",
            ("Traceback (most recent call last)", site),
            1,
            interrupted=True,
            site=site,
        )

    errors: dict[int, CellError | None] = {
        rank: stop("cell [7] line 9" if rank == 2 else "cell [7] line 4 in step") for rank in range(4)
    }
    assert shown(results(errors, interrupted=True, stopped=set(range(4)))) == [
        "KeyboardInterrupt: ranks 0-3 were interrupted; rank 2 was here:",
        "cell [7] line 9",
        "",
        "ranks 0,1,3: interrupted at cell [7] line 4 in step",
    ]


def test_who_came_late_to_what_was_given_up_waited_too() -> None:
    def waited(when: int, *culprits: int) -> CellError:
        said = "allreduce `a`: ranks 1,3 waited; rank 2 finished its cell without it"
        return CellError(
            "AbortedError", said, ("line 4",), when, True, "allreduce `a`", culprits, cause="cell_ended"
        )

    found = shown(results({0: waited(9, 1, 3), 1: waited(2, 2), 2: None, 3: waited(2, 2)}))
    assert found[0] == "allreduce `a`: ranks 0,1,3 waited; rank 2 finished its cell without it"
    assert "stopped" not in "".join(found)


def test_who_came_late_was_stopped_by_the_same_death() -> None:
    found = shown(results({1: aborted(4, 0), 3: aborted(5, 1)}, deaths={0: RankDeath(0, "exit code 7", 3)}))
    assert found[-3] == "ranks 1,3: stopped in allreduce `grad.fc.weight` because rank 0 died"
    assert found[-1] == "`%hvd_pool repair` replaces rank 0"
