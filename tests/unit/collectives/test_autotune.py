"""The tuner's samples, and its results on functions whose best setting is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from hvdlab.collectives import autotune
from hvdlab.collectives.autotune import (
    AXES,
    LEAST_SECONDS,
    MIB,
    TURNS,
    Parameters,
    Tuner,
    TuningOptions,
    TuningPhase,
    TuningSample,
)
from support.effort import examples

START = Parameters(64 * MIB, 0.0)
Speed = Callable[[Parameters], float]


def drive(tuner: Tuner, speed: Speed, limit: int = 10_000) -> list[TuningSample]:
    """Execute steps of one tensor, as fast as the setting allows, until the tuner is done."""
    samples: list[TuningSample] = []
    now = 0.0
    for _ in range(limit):
        tuner.executed([("a", 1_000_000)])
        sample = tuner.advance(now)
        if sample is not None:
            samples.append(sample)
            best = tuner.finish()
            if best is not None:
                return [*samples, best]
        now += 1_000_000 / speed(tuner.parameters)
    raise AssertionError("it did not come to an end")


def flat(parameters: Parameters) -> float:
    return 1e8


def place(parameters: Parameters) -> list[float]:
    """Return how far along each axis a setting lies, from 0 to 1."""
    return [values.index(getattr(parameters, axis)) / (len(values) - 1) for axis, values in AXES.items()]


def hill(at: Parameters, noise: float = 0.0, seed: int = 0) -> Speed:
    """Fastest at one setting, slower the farther from it."""
    rng = random.Random(seed)

    def speed(parameters: Parameters) -> float:
        square = sum((a - b) ** 2 for a, b in zip(place(parameters), place(at), strict=True))
        return 1e8 * (0.3 + math.exp(-2 * square)) * (1 + rng.gauss(0, noise))

    return speed


def test_the_log_tells_the_phases() -> None:
    samples = drive(Tuner(TuningOptions(3, 10, 5), START), hill(Parameters(0, 0.005, 65536)))
    checks = 2 * TURNS
    assert [s.phase for s in samples] == (
        [TuningPhase.WARMUP] * 3
        + [TuningPhase.SAMPLE] * 5
        + [TuningPhase.CHECK] * checks
        + [TuningPhase.BEST]
    )
    assert [s.number for s in samples] == list(range(1, 10 + checks))
    assert {s.parameters for s in samples[:4]} == {START}, (
        "warm-up and first sample are made with what was set"
    )
    assert samples[-1].line().count(",") == TuningSample.header().count(",")


def test_both_settings_are_checked_in_turns() -> None:
    samples = drive(Tuner(TuningOptions(0, 10, 5), START), hill(Parameters(0, 0.005, 65536)))
    checked = [s.parameters for s in samples if s.phase is TuningPhase.CHECK]
    found = checked[1]
    assert found != START
    assert checked == [START, found, found, START, START, found, found, START, START, found]
    assert samples[-1].parameters == found


@pytest.mark.parametrize("seed", range(examples(5)))
def test_where_nothing_is_to_be_gained_the_given_setting_mostly_stays(seed: int) -> None:
    rng = random.Random(seed)
    kept = []
    for _ in range(10):
        tuner = Tuner(TuningOptions(0, 10, 12), START)
        drive(tuner, lambda parameters: 1e8 * (1 + rng.uniform(-0.3, 0.3)))
        kept.append(tuner.parameters == START)
    assert sum(kept) >= 5  # the luckiest of twelve would be another in eleven of twelve runs


def test_the_score_is_bytes_per_second() -> None:
    samples = drive(Tuner(TuningOptions(0, 10, 3), START), flat)
    assert samples[0].score == pytest.approx(1e8, rel=0.15)


def test_settings_change_while_it_looks_and_stay_afterwards() -> None:
    tuner = Tuner(TuningOptions(0, 10, 20), START)
    samples = drive(tuner, hill(START))
    assert len({s.parameters for s in samples}) > 8
    kept = tuner.parameters
    for i in range(100):
        tuner.executed([("a", 1)])
        assert tuner.advance(1000.0 + i) is None
    assert tuner.parameters == kept == samples[-1].parameters


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "best",
    [Parameters(0, 0.005, 65536), Parameters(4 * MIB, 0.001, 262144), Parameters(256 * MIB, 0.0, 524288)],
)
def test_it_finds_a_good_setting_in_spite_of_noise(best: Parameters, seed: int) -> None:
    tuner = Tuner(TuningOptions(0, 10, 20), START)
    drive(tuner, hill(best, noise=0.05, seed=seed))
    truth = hill(best)
    assert truth(tuner.parameters) > 0.75 * truth(best)


def test_the_same_scores_give_the_same_settings() -> None:
    runs = [drive(Tuner(TuningOptions(1, 10, 12), START), hill(Parameters(MIB, 0.001))) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_sample_lasts_until_a_tensor_came_often_enough() -> None:
    tuner = Tuner(TuningOptions(0, 3, 5), START)
    tuner.executed([("a", 100)])
    assert tuner.advance(0.0) is None, "what was submitted before does not count"
    for i, name in enumerate(["a", "b", "a", "b"]):
        tuner.executed([(name, 100)])
        assert tuner.advance(1.0 + i) is None
    tuner.executed([("a", 100)])
    sample = tuner.advance(5.0)
    assert sample is not None
    assert sample.score == 500 / 5.0


def test_a_sample_is_not_too_short() -> None:
    tuner = Tuner(TuningOptions(0, 1, 5), START)
    tuner.executed([("a", 100)])
    tuner.advance(0.0)
    tuner.executed([("a", 100)])
    assert tuner.advance(LEAST_SECONDS / 2) is None
    assert tuner.advance(LEAST_SECONDS) is not None


def test_each_axis_is_swept_with_the_best_values_of_those_before() -> None:
    best = Parameters(MIB, 0.001, 131072)
    samples = drive(Tuner(TuningOptions(0, 10, 50), START), hill(best))
    tried = [s.parameters for s in samples if s.phase is TuningPhase.SAMPLE]
    assert len(tried) == len(set(tried)) == sum(map(len, AXES.values())) - len(AXES) + 1
    assert {p.fusion_threshold for p in tried[:7]} == set(AXES["fusion_threshold"])
    assert {p.fusion_threshold for p in tried[7:]} == {MIB}
    assert {p.flush_delay for p in tried[12:]} == {0.001}
    assert samples[-1].parameters == best


def test_few_samples_end_a_sweep_early() -> None:
    samples = drive(Tuner(TuningOptions(0, 10, 3), START), hill(Parameters(0, 0.0)))
    assert [s.phase for s in samples].count(TuningPhase.SAMPLE) == 3
    assert samples[-1].parameters == Parameters(0, 0.0), "the best of those that were measured"


def test_a_setting_between_the_values_to_try_stays_if_it_is_the_fastest() -> None:
    given = Parameters(3 * MIB, 0.0)
    tuner = Tuner(TuningOptions(0, 10, 20), given)
    drive(tuner, lambda parameters: 2e8 if parameters == given else 1e8)
    assert tuner.parameters == given


def test_a_sample_of_more_tensors_than_are_counted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_TENSORS", 4)
    tuner = Tuner(TuningOptions(0, 3, 5), START)
    tuner.executed([("before", 100)])
    assert tuner.advance(0.0) is None
    for _ in range(3):
        tuner.executed([(name, 100) for name in range(8)])
    assert tuner.advance(10 * LEAST_SECONDS) is not None
