"""The search proposes good configs, stops in time, and repeats itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tracea_jax.tuning.search import batches as search
from tracea_jax.tuning.search import seeding
from tracea_jax.tuning.search.batches import History, Search, codes, encode

pytestmark = pytest.mark.once


def grid(*sizes):
    """Every combination of 0 ... size - 1, as columns."""
    axes = np.meshgrid(*(np.arange(s) for s in sizes), indexing="ij")
    return {f"p{i}": axis.ravel() + 1 for i, axis in enumerate(axes)}


COLUMNS = grid(8, 8, 4, 2)  # 512 candidates
FEATURES = encode(COLUMNS)


def times(columns=COLUMNS, centre=(5, 3, 2, 1)):
    """Smooth, with one optimum at the centre, 1 there."""
    away = [(c - 1 - at) / 4.0 for c, at in zip(columns.values(), centre, strict=True)]
    return np.exp(sum(a * a for a in away))


def run(tuner, cost, fails=()):
    """Answers everything that is asked; returns the batches."""
    batches = []
    while asked := tuner.ask():
        batches.append(asked)
        for i in asked:
            tuner.tell(i, None if i in fails else float(cost[i]))
    return batches


def flat(batches):
    return [i for batch in batches for i in batch]


# Encoding.


def test_numbers_are_scaled_as_they_matter():
    got = encode({"tile": np.array([16, 32, 64, 256]), "use": np.array([0, 1, 1, 0])})
    np.testing.assert_allclose(got, [[0, 0], [0.25, 1], [0.5, 1], [1, 0]])


def test_integers_between_powers_of_two_tell_how_far_they_divide():
    got = encode({"tile": np.array([16, 48, 96, 128])}, alignment=True)
    np.testing.assert_allclose(got[:, 0], np.log2([1, 3, 6, 8]) / 3)
    np.testing.assert_allclose(got[:, 1], [0, 0, 0.5 / 3, 0.5])
    assert encode({"tile": np.array([16, 48, 96, 128])}, alignment=False).shape[1] == 1


def test_names_are_at_equal_distance():
    for values in (["b", "a", "b"], ["c", "a", "b", "c"]):
        got = encode({"kind": np.array(values, dtype=object)})
        for i, a in enumerate(values):
            for j, b in enumerate(values):
                assert np.linalg.norm(got[i] - got[j]) == pytest.approx(float(a != b))


def test_what_never_changes_is_no_feature():
    got = encode({"one": np.ones(3), "all": np.array(["x"] * 3), "two": np.arange(3)})
    np.testing.assert_allclose(got, [[0], [0.5], [1]])


def test_bad_columns_are_refused():
    with pytest.raises(ValueError, match="one length"):
        encode({"a": np.arange(3), "b": np.arange(4)})
    with pytest.raises(ValueError, match="'a' must be finite"):
        encode({"a": np.array([1.0, np.nan])})


def test_codes_are_equal_where_values_are():
    got = codes({"a": np.array([8, 4, 8]), "b": np.array([None, "x", "x"])})
    np.testing.assert_array_equal(got[:, 0], [1, 0, 1])
    assert got[1, 1] == got[2, 1] != got[0, 1]


# Asking.


def test_it_finds_the_optimum_in_few_evaluations():
    cost = times()
    for seed in range(3):
        order = flat(run(Search(FEATURES, budget=48, seed=seed), cost))
        assert cost[order].min() == 1.0  # by luck once in ten times


def test_batches_are_disjoint_and_within_the_budget():
    batches = run(Search(FEATURES, budget=99, batch=8, gain=0.0), times())
    assert len(set(flat(batches))) == len(flat(batches)) == 99
    sizes = [len(b) for b in batches[:-1]]
    assert max(sizes) == sizes[-1] == 8  # once enough is known
    assert max(map(len, run(Search(FEATURES, batch=3), times()))) == 3


def test_what_is_known_of_few_evaluations_decides_one_more():
    """After the design each pick waits for the time of the one before, until 16."""
    sizes = [len(b) for b in run(Search(FEATURES, budget=28, gain=0.0), times())]
    assert sizes == [5, *[1] * 11, 4, 4, 4]


def test_batches_stay_where_more_is_known():
    """Kernels of a batch compile together, and a model or a history can choose them."""
    model = Search(FEATURES, log_prior=np.log(times()), budget=28, gain=0.0)
    past = Search(FEATURES, history=history((5, 3, 2, 1)), budget=28, gain=0.0)
    for tuner, design in ((model, [8, 6]), (past, [2])):
        sizes = [len(b) for b in run(tuner, times())]
        assert sizes[: len(design)] == design
        assert min(sizes[len(design) : -1]) == 4


def test_a_seed_decides_everything():
    first, same, other = (
        run(Search(FEATURES, budget=40, seed=seed), times()) for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_the_given_ones_come_first():
    first = [7, 300, 7, 2]
    batches = run(Search(FEATURES, first=first, budget=24), times())
    assert batches[0][:3] == (7, 300, 2)
    assert len(set(flat(batches))) == 24


def test_small_spaces_are_swept_in_order():
    features, cost = FEATURES[:150], times()[:150]
    tuner = Search(features, first=[70], budget=200)
    assert flat(run(tuner, cost)) == [70, *(i for i in range(150) if i != 70)]
    assert tuner.stop == "complete"
    assert len(flat(run(Search(features, budget=20, gain=0.0), cost))) == 20


def test_nothing_is_asked_twice_while_batches_are_pending():
    tuner = Search(FEATURES, budget=48, gain=0.0)
    cost, waiting, asked = times(), [], []
    while batch := tuner.ask():
        waiting.append(batch)
        asked += batch
        if len(waiting) > 2:
            for i in waiting.pop(0):
                tuner.tell(i, float(cost[i]))
    assert len(set(asked)) == len(asked) == 48
    assert cost[asked].min() < 1.1


def test_it_asks_on_when_nothing_was_told():
    tuner = Search(FEATURES, budget=40)
    asked = flat(iter(tuner.ask, ()))
    assert len(set(asked)) == len(asked) == 40
    assert tuner.ask() == () and tuner.stop == "budget"


def test_told_without_being_asked_is_known():
    cost = times()
    tuner = Search(FEATURES, budget=40, gain=0.0)
    for i in range(0, 512, 16):
        tuner.tell(i, float(cost[i]))
    order = flat(run(tuner, cost))
    assert len(order) == 8 and not set(order) & set(range(0, 512, 16))


def test_failures_are_avoided():
    """A quarter of the space fails; the search learns where."""
    fails = set(np.flatnonzero((COLUMNS["p0"] > 4) & (COLUMNS["p1"] > 4)).tolist())
    cost = times()
    tuner = Search(FEATURES, budget=64, gain=0.0)
    order = flat(run(tuner, cost, fails))
    worked = [i for i in order if i not in fails]
    assert cost[worked].min() == cost[[i for i in range(512) if i not in fails]].min()
    assert sum(i in fails for i in order[24:]) < 40 / 4


def test_it_survives_that_everything_fails():
    tuner = Search(FEATURES, budget=40)
    order = flat(run(tuner, times(), fails=range(512)))
    assert len(set(order)) == 40 and tuner.stop == "budget"


def test_large_spaces_are_sampled(monkeypatch):
    monkeypatch.setattr(search, "CANDIDATES", 100)
    cost = times()
    order = flat(run(Search(FEATURES, codes=codes(COLUMNS), budget=64, gain=0.0), cost))
    assert len(set(order)) == 64
    assert cost[order].min() < 1.1


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_only_times_can_be_told(wrong):
    tuner = Search(FEATURES)
    with pytest.raises(ValueError, match="positive"):
        tuner.tell(0, wrong)
    with pytest.raises(IndexError, match="from 0 to 511"):
        tuner.tell(512, 1.0)
    with pytest.raises(IndexError, match="candidate -1"):
        Search(FEATURES, first=[3, -1])


# Stopping.


def test_it_stops_when_nothing_is_to_be_gained():
    cost = times()
    tuner = Search(FEATURES, budget=400)
    assert tuner.expected_gain == np.inf
    order = flat(run(tuner, cost))
    assert tuner.stop == "converged"
    assert 32 <= len(order) < 200
    assert tuner.expected_gain < 0.01
    assert cost[order].min() == 1.0
    assert tuner.ask() == ()


def test_the_floor_is_kept():
    tuner = Search(FEATURES, budget=400, floor=100, gain=0.5)
    assert len(flat(run(tuner, times()))) == pytest.approx(100, abs=8)


def test_asking_again_is_no_confirmation():
    """That nothing is to be gained must hold on new evidence, not on the same."""
    cost = times()
    tuner = Search(FEATURES, budget=400, gain=1e9, floor=0)

    def answer(asked):
        for i in asked:
            tuner.tell(i, float(cost[i]))

    answer(tuner.ask())
    asked = flat(tuner.ask() for _ in range(16))
    assert tuner.expected_gain < 1e9 and tuner.stop is None
    answer(asked[:11])
    assert tuner.ask() and tuner.stop is None
    answer(asked[11:12])
    assert tuner.ask() == () and tuner.stop == "converged"


# Seeds.


def test_diverse_seeds_are_good_and_apart():
    rng = np.random.default_rng(0)
    predicted = np.log(times()) + 0.3 * rng.standard_normal(512)
    picked = seeding.diverse(FEATURES, predicted, 12, [])
    assert len(set(picked)) == 12
    assert picked[0] == np.argmin(predicted)
    top = np.argsort(predicted)
    assert set(picked) <= set(top[:256].tolist())

    def spread(indices):
        away = FEATURES[indices][:, None] - FEATURES[indices]
        return np.linalg.norm(away, axis=2)[np.triu_indices(len(indices), 1)].min()

    assert spread(picked) > spread(top[:12])
    assert predicted[picked].mean() < predicted.mean()


def test_diverse_seeds_leave_out_the_chosen_and_the_hopeless():
    predicted = np.full(20, np.inf)
    predicted[:6] = np.arange(6)
    same = np.zeros((20, 2))  # all in one place: distance cannot tell them apart
    assert sorted(seeding.diverse(same, predicted, 12, [2])) == [0, 1, 3, 4, 5]


def test_a_model_finds_the_optimum_sooner():
    """Eight of sixteen evaluations from a rough model beat sixteen without one."""
    cost = times()
    rng = np.random.default_rng(1)
    rough = np.log(cost) + 0.3 * rng.standard_normal(512)

    def best(prior, seed):
        tuner = Search(FEATURES, log_prior=prior, budget=16, seed=seed)
        return cost[flat(run(tuner, cost))].min()

    seeded = np.mean([best(rough, s) for s in range(4)])
    assert seeded < np.mean([best(None, s) for s in range(4)])


# Other problems.


def history(centre, log_scale=0.0):
    """All of a like problem, as inefficiencies."""
    some = np.random.default_rng(0).permutation(512)[:64]
    return History(
        features=FEATURES[some],
        shapes=np.zeros((64, 1)),
        values=np.log(times(centre=centre)[some]) + log_scale,
        shape=np.ones(1),
    )


def test_a_like_problem_saves_evaluations():
    cost = times()
    order = flat(run(Search(FEATURES, history=history((5, 3, 2, 1)), budget=16), cost))
    assert cost[order].min() < 1.1


def test_an_empty_history_is_none():
    empty = History(
        features=FEATURES[:0],
        shapes=np.zeros((0, 1)),
        values=np.zeros(0),
        shape=np.ones(1),
    )
    cost = times()
    batches = run(Search(FEATURES, history=empty, budget=32), cost)
    assert batches == run(Search(FEATURES, budget=32), cost)


def test_a_model_and_a_history_work_together():
    cost = times()
    prior = np.log(cost)[::-1].copy()  # misleading
    some = history((5, 3, 2, 1))
    for log_prior in (None, np.zeros(64)):
        both = dataclasses.replace(some, log_prior=log_prior)
        tuner = Search(FEATURES, history=both, log_prior=prior, budget=48, gain=0.0)
        assert cost[flat(run(tuner, cost))].min() < 1.1


def test_an_unlike_problem_does_not_mislead():
    cost = times()
    far = history((0, 7, 0, 0))
    order = flat(run(Search(FEATURES, history=far, budget=64, gain=0.0), cost))
    assert cost[order].min() < 1.1


def test_a_long_history_is_cut_to_the_nearest_problems(monkeypatch):
    monkeypatch.setattr(search, "CAP", 68)  # four are told at the first fit
    near, far = history((5, 3, 2, 1)), history((0, 7, 0, 0), 1.0)
    both = History(
        features=np.concatenate([far.features, near.features]),
        shapes=np.concatenate([far.shapes - 50, near.shapes]),
        values=np.concatenate([far.values, near.values]),
        shape=near.shape,
    )
    cost = times()
    order = flat(run(Search(FEATURES, history=both, budget=12), cost))
    assert order == flat(run(Search(FEATURES, history=near, budget=12), cost))
