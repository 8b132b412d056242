"""Training against the exact trajectories; rates, stopping, resuming."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pathspace.sequences import CNN, PCNN, RNN
from pathspace.sequences.batches import Batches
from pathspace.sequences.evaluation import code_length
from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import Direction, start
from pathspace.sequences.passes import forward, transition_direction, writing_direction
from pathspace.sequences.prior import Prior
from pathspace.sequences.text import Corpus
from pathspace.sequences.training import Settings, Training, train
from sequences.fixture import assert_close, exact

METRICS = {"full_rbpm": "rbp", "qd_rbpm": "rbp-qd", "qd_rutsd": "rutsd-qd"}


@pytest.mark.parametrize("name", sorted(exact()["trajectory"]["runs"]))
def test_trajectories_agree_with_exact_values(name):
    data = exact()["trajectory"]
    run = data["runs"][name]
    x = np.array([data["alphabet"].index(symbol) for symbol in data["text"]])
    corpus = Corpus.of([x], len(data["alphabet"]))
    graph = Graph.from_edges(data["N"], data["edges_out"])
    kind, _, metric = name.split("_", 2)
    u = np.array(data["u[j][y] (row 0 unused)"])
    training = Training.begin(start(kind, "tanh", graph, corpus, u))
    seen = []
    settings = Settings(metric=METRICS[metric], passes=len(run["log"]))
    training = train(training, corpus, settings, report=seen.append)
    tries = np.diff([0] + [record.tries for record in seen])
    for record, expected, tried in zip(seen, run["log"], tries, strict=True):
        assert record.log_likelihood == pytest.approx(expected["LL"], abs=1e-6)
        assert record.rate_w == pytest.approx(expected["eta_w"], rel=1e-12)
        assert record.rate_tau == pytest.approx(expected["eta_tau"], rel=1e-12)
        assert tried == expected["tries"]
    bits = code_length(training.model, corpus)
    assert bits == pytest.approx(run["validation_bits_on_train_text"], abs=1e-5)


def some_training(kind="pcnn", units=6, length=400, seed=0):
    rng = np.random.default_rng(seed)
    x = np.cumsum(rng.integers(0, 2, length)) % 4
    corpus, validation = Corpus.of([x[: length // 2]], 4), Corpus.of([x[length // 2 :]], 4)
    return (
        Training.begin(start(kind, "tanh", Graph.random(units, 2, rng), corpus, rng)),
        corpus,
        validation,
    )


@pytest.mark.parametrize("kind", ["pcnn", "cnn", "rnn"])
@pytest.mark.parametrize("writing", ["qdh", "dh", "fisher", "bp"])
@pytest.mark.sample(6)
def test_training_never_loses_and_learns(kind, writing):
    training, corpus, _ = some_training(kind)
    metric = "rbp-qd" if kind == "rnn" else "rbp"
    trace = []
    train(
        training, corpus, Settings(metric=metric, writing=writing, passes=60), report=trace.append
    )
    values = [record.log_likelihood for record in trace]
    assert np.all(np.diff(values) >= 0)
    # two bits for each of four symbols to begin with, one bit in the end
    assert values[-1] > forward(training.model, corpus).log_likelihood / 1.7


def test_resumed_training_is_bit_by_bit_the_same():
    training, corpus, validation = some_training()
    whole = train(training, corpus, Settings(passes=41), validation)
    half = train(training, corpus, Settings(passes=17), validation)
    resumed = train(half, corpus, Settings(passes=41), validation)
    for name in ("w", "tau", "V0"):
        assert np.array_equal(getattr(whole.model, name), getattr(resumed.model, name))
        assert np.array_equal(getattr(whole.result, name), getattr(resumed.result, name))
    for name in (
        "rate_w",
        "rate_tau",
        "passes",
        "tries",
        "log_likelihood",
        "best_bits",
        "best_pass",
    ):
        assert getattr(whole, name) == getattr(resumed, name)


def test_another_validation_text_starts_its_own_record():
    training, corpus, validation = some_training()
    half = train(training, corpus, Settings(passes=16), validation)
    for other in (
        Corpus.of([validation.x[:11]], validation.A),
        Corpus.of([np.tile(validation.x, 3)], validation.A),
    ):
        resumed = train(half, corpus, Settings(passes=26), other)
        assert resumed.best_bits == code_length(resumed.result, other)
        assert resumed.best_bits <= code_length(half.result, other)


def test_a_training_without_a_pass_takes_another_validation_text():
    training, corpus, validation = some_training()
    begun = train(training, corpus, Settings(passes=0), Corpus.of([validation.x[:3]], validation.A))
    resumed = train(begun, corpus, Settings(passes=12), validation)
    whole = train(training, corpus, Settings(passes=12), validation)
    assert whole.best_pass > 0
    assert (resumed.best_pass, resumed.best_bits) == (whole.best_pass, whole.best_bits)


def test_going_on_without_a_validation_text_keeps_what_was_learned_last():
    training, corpus, validation = some_training(units=12, length=120)
    half = train(training, corpus, Settings(passes=80), validation)
    assert half.best_pass < 80
    resumed = train(half, corpus, Settings(passes=81))
    assert resumed.result is resumed.model
    assert resumed.best_bits == math.inf


def test_seconds_do_not_pay_for_the_compiler(monkeypatch):
    training, corpus, validation = some_training()
    clock = iter(range(10**6))
    monkeypatch.setattr("pathspace.sequences.training.time.perf_counter", lambda: next(clock))
    seen = []
    monkeypatch.setattr(
        "pathspace.sequences.training._compile", lambda *_: seen.append(next(clock))
    )
    done = train(training, corpus, Settings(passes=1), validation)
    assert seen == [0]
    assert done.seconds == 1


def test_validation_keeps_the_best_and_patience_stops():
    training, corpus, validation = some_training(units=12, length=120)
    seen = []
    done = train(training, corpus, Settings(passes=2000, patience=40), validation, seen.append)
    looks = [record.validation_bits for record in seen if record.passes % 2 == 0]
    assert done.passes < 2000
    assert done.passes - done.best_pass >= 40
    assert done.best_bits == min(looks)
    assert code_length(done.result, validation) == done.best_bits
    assert code_length(done.model, validation) > done.best_bits


@pytest.mark.parametrize(("passes", "every"), [(1, 2), (5, 8), (11, 8)])
def test_the_last_passes_are_looked_at_whatever_the_schedule(passes, every):
    training, corpus, validation = some_training()
    done = train(training, corpus, Settings(passes=passes, validate_every=every), validation)
    assert done.result is done.model
    assert (done.result_pass, done.result_bits) == (passes, code_length(done.model, validation))
    # which is no look of the schedule of a training that goes on
    seen = []
    train(done, corpus, Settings(passes=passes + 1, validate_every=every), validation, seen.append)
    assert seen[0].result_pass == done.best_pass or seen[0].passes % every == 0


@pytest.mark.parametrize(("patience", "every"), [(1, 2), (10, 20)])
def test_patience_ends_no_training_before_a_look(patience, every):
    training, corpus, validation = some_training(units=12, length=120)
    done = train(
        training, corpus, Settings(passes=2000, patience=patience, validate_every=every), validation
    )
    assert done.best_pass >= every
    assert done.passes == done.best_pass + every


@pytest.mark.parametrize("kind", ["pcnn", "cnn", "rnn"])
def test_reach_bounds_what_a_step_changes_at_every_symbol(kind):
    model, rng = some_training(kind)[0].model, np.random.default_rng(3)
    tau, rho = (
        0.3 * rng.standard_normal(model.tau.shape),
        0.3 * rng.standard_normal(model.rho.shape),
    )
    rho[:, :1] = 0
    direction = Direction(tau=tau, rho=rho if rho.size else np.zeros(()), V0=rng.standard_normal(7))
    reach = 0.7
    moved, free = model.moved(direction, 0.9, reach), model.moved(direction, 0.9)
    step, wanted = (each.contextual_tau() - model.contextual_tau() for each in (moved, free))
    scales = []
    for j in range(1, model.units + 1):
        edges = slice(model.graph.first[j], model.graph.first[j + 1])
        # what reading y changes in V_j is largest where each activity is 1 with the sign of its
        # weight
        change = np.abs(step[:, edges]).sum(axis=1)
        assert np.all(change <= reach * (1 + 1e-12))
        # each block keeps its direction; one that is within reach already stays as it is
        scale = change / np.abs(wanted[:, edges]).sum(axis=1)
        np.testing.assert_allclose(step[:, edges], wanted[:, edges] * scale[:, None], atol=1e-12)
        if kind == "rnn":
            np.testing.assert_allclose(scale, scale[0])
        else:
            assert np.all((np.abs(change - reach) < 1e-12) | (np.abs(scale - 1) < 1e-12))
        scales.append(scale)
    assert np.min(scales) < 0.9
    assert kind == "rnn" or np.max(scales) > 1 - 1e-12
    np.testing.assert_allclose(moved.V0, model.V0 + np.clip(0.9 * direction.V0, -reach, reach))


def test_a_reach_that_bounds_nothing_changes_nothing_and_one_that_does_still_learns():
    training, corpus, _ = some_training()
    plain = train(training, corpus, Settings(passes=40, damping=1e-6))
    loose = train(training, corpus, Settings(passes=40, damping=1e-6, reach=1e9))
    assert np.array_equal(plain.model.tau, loose.model.tau)
    seen = []
    train(training, corpus, Settings(passes=40, damping=1e-6, reach=0.01), report=seen.append)
    values = [record.log_likelihood for record in seen]
    assert np.all(np.diff(values) >= 0)
    assert values[-1] > values[0]
    assert values[-1] != plain.log_likelihood


def test_rates_of_steps_that_reach_bounds_end_below_infinity():
    """Such steps are alike at all rates, so that each pass would raise them; no file holds an infinite one."""
    corpus = Corpus.of([np.tile([0, 1, 2, 0, 2], 60)], 3)
    model = start("pcnn", "tanh", Graph.full(2), corpus, np.random.default_rng(0))
    training = train(Training.begin(model, 2.0**50), corpus, Settings(passes=300, reach=1e-6))
    assert training.rate_tau == 2.0**60


def test_no_time_means_no_pass():
    training, corpus, _ = some_training()
    assert train(training, corpus, Settings(seconds=0.0)).passes == 0


def test_a_singular_metric_without_damping_ends_a_training():
    training, corpus, _ = some_training()
    model = replace(training.model, w=np.zeros_like(training.model.w))
    ended = train(Training.begin(model, 1e-300), corpus, Settings(damping=0.0, passes=9))
    assert ended.broke_off
    assert ended.passes == ended.best_pass == 1
    assert not train(Training.begin(model, 1e-300), corpus, Settings(passes=9)).broke_off


@pytest.mark.parametrize("metric", ["rbp", "rutsd-qd"])
def test_a_symbol_that_the_text_lacks_has_a_whole_metric_with_damping_alone(metric):
    """Without it the whole one ends the training, by no warning of NumPy; of a quasi-diagonal one it does not move."""
    training, corpus, _ = some_training()
    wider = Corpus.of([corpus.x], corpus.A + 1)
    graph = training.model.graph
    begin = Training.begin(start("pcnn", "tanh", graph, wider, np.random.default_rng(0)))
    ended = train(begin, wider, Settings(metric=metric, damping=0.0, passes=9))
    assert ended.broke_off is (metric == "rbp")
    if metric != "rbp":
        assert ended.passes == 9
        assert (ended.model.tau[-1] == begin.model.tau[-1]).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"metric": "hessian"}, "unknown metric 'hessian'"),
        ({"writing": "x"}, "unknown writing step 'x'"),
        ({"damping": -1.0}, "damping"),
        ({"damping": float("nan")}, "damping"),
        ({"writing_damping": -1.0}, "writing_damping must be at least 0 and finite, got -1.0"),
        # with infinite ones nothing was learned, without a word
        ({"damping": math.inf}, "damping must be at least 0 and finite, got inf"),
        ({"prior_writing": math.inf}, "prior_writing must be at least 0 and finite"),
        ({"reach": 0.0}, "reach must be above 0"),
        ({"reach": math.inf}, "reach must be above 0 and finite, or None for no bound, got inf"),
        ({"seconds": math.nan}, "seconds must be at least 0, or None for no bound, got nan"),
        ({"validate_every": 0}, "validate_every"),
        ({"batch": 0}, "batch must be a whole number of at least 1, or None for all texts, got 0"),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"batch": 2, "grow": True}, "batches of texts do not grow"),
        ({"patience": -1}, "patience must be at least 0, or None for no end of it, got -1"),
        ({"patience": math.nan}, "patience must be at least 0"),
    ],
)
def test_settings_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_move_nothing_are_refused(rate):
    training, _, _ = some_training()
    with pytest.raises(ValueError, match="rate must be above 0 and finite"):
        Training.begin(training.model, rate)


def test_code_length_counts_predicted_symbols_at_their_places():
    training, corpus, _ = some_training()
    model = training.model
    x = corpus.x[:10]
    chi = np.zeros(10, bool)
    chi[[3, 7]] = True
    pi = forward(model, Corpus.of([x], 4)).pi
    places = (3, 7, 13, 17)
    expected = -sum(
        np.log2((1 - 1 / (t + 2)) * pi[t % 10, x[t % 10]] + 1 / (4 * (t + 2))) for t in places
    )
    masked = Corpus.of([x, x], 4, [chi, chi])
    assert_close(code_length(model, masked), expected, 1e-13)


def test_a_prior_pulls_to_the_start_and_never_loses_its_own_objective():
    training, corpus, _ = some_training()
    start_model = training.model
    free = train(training, corpus, Settings(passes=60)).model
    held = train(
        training, corpus, Settings(passes=60, prior_transition=1e6, prior_writing=1e6)
    ).model
    between = start_model.graph.sources > 0
    assert np.abs(held.tau - start_model.tau)[:, between].max() < 1e-3
    assert np.abs(held.w - start_model.w)[1:].max() < 1e-3
    assert np.abs(free.tau - start_model.tau)[:, between].max() > 0.1
    prior = Prior.around(start_model, 0.3, 0.7)
    trace = []
    settings = Settings(passes=40, prior_writing=0.3, prior_transition=0.7)
    done = train(training, corpus, settings, report=trace.append)
    objective = [record.log_likelihood - prior.penalty(record.model) for record in trace]
    assert np.all(np.diff(objective) >= 0)
    half = train(training, corpus, replace(settings, passes=15))
    assert np.array_equal(train(half, corpus, settings).model.tau, done.model.tau)


@pytest.mark.parametrize("kind", ["pcnn", "rnn"])
def test_directions_with_a_prior_climb_the_objective(kind):
    training, corpus, _ = some_training(kind)
    centre = training.model
    settings = Settings(metric="rbp-qd", passes=6)
    model = train(training, corpus, settings).model
    prior = Prior.around(centre, 20.0, 30.0)

    def objective(moved):
        return forward(moved, corpus).log_likelihood - prior.penalty(moved)

    state = forward(model, corpus)
    for direction in (
        writing_direction(model, corpus, state, prior=prior),
        transition_direction(model, corpus, state, "rbp-qd", prior=prior),
    ):
        slope = (
            objective(model.moved(direction, 1e-5)) - objective(model.moved(direction, -1e-5))
        ) / 2e-5
        assert slope > 0
    step = transition_direction(model, corpus, state, "fb", prior=prior)
    plain = transition_direction(model, corpus, state, "fb")
    assert_close(step.tau - plain.tau, prior.tau * (centre.tau - model.tau), 1e-9)


def twins(model, metric, **options):
    """Train two networks, whose start is one function in two coordinates; log-likelihoods and bits by the squash."""
    symbols = np.cumsum(np.random.default_rng(1).integers(0, 2, 600)) % 4
    text = "".join("abcd"[k] for k in symbols)
    options |= {
        "units": 4,
        "connectivity": 2,
        "metric": metric,
        "damping": 0.0,
        "passes": 12,
        "seed": 3,
    }
    found = {}
    for squash in ("tanh", "logistic"):
        seen = []
        network = model(squash=squash, **options)
        network.fit(text, report=lambda training, seen=seen: seen.append(training.log_likelihood))
        found[squash] = np.array(seen), network.bits(text[::-1])
    return found["tanh"], found["logistic"]


@pytest.mark.parametrize(
    ("model", "metric", "writing"),
    [
        (PCNN, "rbp", "qdh"),
        (PCNN, "rutsd-qd", "qdh"),
        (PCNN, "rbp", "fisher"),
        (CNN, "rutsd", "qdh"),
        (CNN, "rbp-qd", "qdh"),
        (RNN, "rbp-qd", "fisher"),
        (RNN, "rutsd-qd", "qdh"),
    ],
)
def test_without_dampings_tanh_and_logistic_networks_learn_the_same(model, metric, writing):
    tanh, logistic = twins(model, metric, writing=writing, writing_damping=0.0)
    assert len(tanh[0]) == 12
    # the metrics are nearly singular, which amplifies the rounding
    assert_close(logistic[0], tanh[0], 1e-7)
    assert logistic[1] == pytest.approx(tanh[1], rel=1e-6)


@pytest.mark.parametrize(
    "writing",
    [{"writing_damping": 1.0}, {"writing": "dh", "writing_damping": 0.0}, {"writing": "bp"}],
)
def test_with_a_damping_of_writing_steps_or_their_diagonal_alone_they_part(writing):
    tanh, logistic = twins(PCNN, "rbp-qd", **writing)
    assert np.abs(logistic[0] - tanh[0]).max() > 1


@pytest.mark.parametrize("metric", ["rbp-qd", "rutsd-qd", "rutsd"])
def test_the_start_of_a_saturated_unit_stays_without_damping(metric):
    """The start value has no effect: its gradient and its modulus are 0."""
    training, corpus, _ = some_training()
    w, V0 = np.random.default_rng(2).normal(size=training.model.w.shape), training.model.V0.copy()
    V0[2] = 60.0
    model = replace(training.model, w=w, V0=V0, kind="cnn")
    step = transition_direction(model, corpus, forward(model, corpus), metric, 0.0)
    assert step.V0[2] == 0
    assert np.isfinite(step.V0).all()
    assert (step.V0[[1, 3]] != 0).all()


def several(count=7, seed=0):
    """Texts of which the last one has nothing to predict, and the first one a symbol of its own."""
    rng = np.random.default_rng(seed)
    texts = [np.cumsum(rng.integers(0, 2, 30 + 5 * k)) % 4 for k in range(count)]
    texts[0][3] = 4
    masks = [np.ones(len(x), bool) for x in texts]
    masks[-1][:] = False
    corpus = Corpus.of(texts, 5, masks)
    return Training.begin(start("pcnn", "tanh", Graph.random(5, 2, rng), corpus, rng)), corpus


def test_batches_deal_every_text_once_a_round_in_a_new_order():
    _, corpus = several()
    batches = Batches(corpus, 2)
    rounds = []
    for first in (0, 6):
        lengths = []
        for passes in range(first, first + 6):
            part = batches.at(passes)
            # the writing and the transition step after it have the same batch
            assert part is batches.at(passes - passes % 2)
            assert part.whole is corpus
            np.testing.assert_array_equal(part.frequencies, corpus.frequencies)
            lengths += np.diff(part.bounds).tolist() if passes % 2 == 0 else []
        rounds.append(lengths)
    # not the last text, of which nothing is predicted
    assert sorted(rounds[0]) == sorted(rounds[1]) == [30 + 5 * k for k in range(6)]
    assert rounds[0] != rounds[1]
    assert Batches(corpus, None).at(5) is Batches(corpus, 6).at(5) is corpus


def test_a_batch_sums_gradients_and_metrics_over_its_texts():
    """A first step on a batch is that on these texts alone, but for the frequencies, which are those of all texts."""
    training, corpus = several()
    part = Batches(corpus, 2).at(0)
    alone = replace(part, whole=None)
    state = forward(training.model, alone)
    expected = writing_direction(training.model, alone, state, "qdh", 0.0)
    assert_close(writing_direction(training.model, part, state, "qdh", 0.0).w, expected.w)
    once = train(training, corpus, Settings(batch=2, passes=1))
    step = writing_direction(training.model, part, forward(training.model, part)).w
    moved = once.model.w - training.model.w
    assert_close(moved, training.rate_w * 0.5 ** (once.tries - 1) * step, 1e-9)


@pytest.mark.parametrize(("size", "prior"), [(1, 0.0), (2, 0.1), (4, 0.0)])
def test_training_on_batches_learns_and_resumes_exactly(size, prior):
    begin, corpus = several()
    settings = Settings(batch=size, passes=40, prior_writing=prior, patience=None)
    whole = train(begin, corpus, settings)
    # what the training says at its end is of all texts
    assert whole.log_likelihood == pytest.approx(
        forward(whole.model, corpus).log_likelihood, rel=1e-12
    )
    assert whole.log_likelihood > forward(begin.model, corpus).log_likelihood + 50
    for stop in (17, 18):
        half = train(begin, corpus, replace(settings, passes=stop))
        both = train(half, corpus, settings)
        np.testing.assert_array_equal(both.model.w, whole.model.w)
        np.testing.assert_array_equal(both.model.tau, whole.model.tau)
        assert both.tries == whole.tries


def test_a_batch_of_all_texts_is_no_batch():
    begin, corpus = several()
    plain = train(begin, corpus, Settings(passes=9))
    for size in (6, 99):
        same = train(begin, corpus, Settings(passes=9, batch=size))
        np.testing.assert_array_equal(same.model.tau, plain.model.tau)


def test_networks_take_batches_of_texts():
    texts = ["abcabcabc" * 3, "bcabca" * 4, "cabcab" * 5, "abcabc" * 4]
    options = {"units": 4, "connectivity": 2, "passes": 60, "batch": 1, "seed": 1}
    online = PCNN(**options).fit(texts[:3], validation=texts[3])
    assert online.bits(texts[3]) < 0.5 * len(texts[3])
    assert (
        PCNN(**options).fit(texts[:3], passes=10).fit(texts[:3], resume=True).training_.passes == 60
    )


def test_short_texts_cost_what_their_probabilities_say():
    """The uniform part counts symbols from text to text: once for all of them, log2(T + 1) bits at most."""
    texts = ["BTXSE", "BPVVE"] * 60
    model = PCNN(units=4, passes=60).fit(texts)
    plain = -model.training_.log_likelihood / math.log(2)
    uniform = math.log2(sum(map(len, texts)) + 1)
    assert plain < model.bits(texts) < plain + uniform
    assert model.fit(texts, texts, passes=4).training_.validation_bits < (
        -model.training_.log_likelihood / math.log(2) + uniform
    )
    # log2(1 + 1 / (t + 1)) at most for symbol t, with t from 0 in the first text alone
    x = [model.alphabet_.encode(text) for text in texts[:3]]
    expected, t = 0.0, 0
    for part, text in zip(x, texts[:3], strict=True):
        for k, y in enumerate(part):
            p = list(model.predict(text[:k]).values())[y]
            expected -= math.log2((1 - 1 / (t + 2)) * p + 1 / ((t + 2) * len(model.alphabet_)))
            t += 1
    assert model.bits(texts[:3]) == pytest.approx(expected)
