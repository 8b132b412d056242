"""Mixed models as a user meets them: bits, prediction, samples, files and compressed files."""

import json

import numpy as np
import pytest
import sklearn.base
import sklearn.model_selection
import sklearn.pipeline
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from pathspace.sequences import (
    PCNN,
    CorruptedError,
    Mixed,
    ModelFileError,
    NotFittedError,
    UnseenSymbolError,
    compress,
    decompress,
    load,
    merge,
    storage,
)
from pathspace.sequences.mixed_storage import KEY, read
from pathspace.sequences.mixing import Reading, blank
from pathspace.sequences.tasks import music

LINES = [
    f"10:{k // 60:02}:{k % 60:02} GET /page{k * k % 7}.html {200 + 204 * (k % 11 == 0)}\n"
    for k in range(150)
]
LOG = "".join(LINES).encode()


def network():
    return PCNN(units=5, passes=20)


@pytest.fixture(scope="module", params=["contexts", "network"])
def model(request):
    return Mixed(network() if request.param == "network" else None).fit(LOG, 0.2)


def test_contexts_and_the_network_together_need_the_fewest_bits():
    plain = network().fit(LOG, 0.2)
    alone, mixed = Mixed().read(LOG, 0.2), Mixed(plain).read(LOG, 0.2)
    assert mixed.validation_bits_ < 1.02 * alone.validation_bits_ < 0.3 * plain.training_.best_bits
    # the network knows the text, and the weights are learned without it
    assert mixed.bits_ == alone.bits_
    assert Mixed(plain).read(LOG, 0.2, unseen=True).bits_ < alone.bits_


def events(count):
    """Event ids of sessions, some of whose events are drawn at random: a network learns these by heart."""
    rng, found = np.random.default_rng(0), []
    while len(found) < count:
        kind = rng.integers(4)
        found += [["E27", "E13", "E21"], ["E9", "E2"], ["E10", "E24"], ["E12"]][kind]
        found += [f"E{k}" for k in rng.integers(1, 27, kind)]
    return found[:count]


@pytest.fixture(scope="module")
def memorized():
    text = events(700)
    plain = PCNN(units=16, passes=120).fit(text[:600], tokens=True, alphabet=text)
    return plain, text[:600], text[600:]


@pytest.mark.parametrize("way", ["fit", "read", "longer", "told"])
def test_a_network_that_knows_the_text_is_not_trusted_too_far(memorized, way):
    plain, text, held = memorized
    alone = Mixed().fit(text, tokens=True, alphabet=text + held).bits(held)
    assert Mixed(plain).read(text, unseen=True).bits(held) > 1.4 * alone
    if way == "fit":
        mixed = Mixed(sklearn.base.clone(plain)).fit(text, tokens=True, alphabet=held)
    elif way == "told":
        mixed = Mixed(plain).read(text[100:], unseen=False)
    else:  # what it was fitted to, with more after it
        mixed = Mixed(plain).read(text + held[:20] * (way == "longer"))
    assert mixed.bits(held) < 1.15 * alone


def test_a_network_learns_more_than_contexts_and_is_trusted():
    bars = music.generate(np.random.default_rng(1), bars=150)
    text, held = bars[:1400], bars[1400:]
    alone = Mixed().fit(text, alphabet=bars).bits(held)
    mixed = Mixed(PCNN(units=12, passes=100)).fit(text, alphabet=bars)
    assert mixed.bits(held) < 0.97 * alone
    assert mixed.model.training_.result_pass == 100  # the network itself knows all of the text


def test_the_weights_are_learned_with_a_network_that_has_not_seen_the_text():
    half = len(LOG) // 2
    mixed = Mixed(network()).fit(LOG)
    first = network().fit(LOG[:half], alphabet=LOG)
    alone = Mixed().read(LOG[:half], alphabet=LOG).bits_
    # the contexts of the whole text, which know its frequencies
    tree = mixed.reading_.tree
    reading = Reading(None, tree, blank(tree, len(LOG)))
    x = mixed.alphabet_.encode(LOG)
    bits = reading.score(x[:half])
    assert bits == pytest.approx(alone, rel=0.02)
    bits += Reading(first.parameters_, tree, reading.memory).score(x[half:])
    assert mixed.bits_ == bits
    reading.round_weights()
    assert np.array_equal(mixed.reading_.memory.by_node, reading.memory.by_node)
    assert mixed.model.bits(LOG) == network().fit(LOG).bits(LOG)


@pytest.mark.parametrize(
    ("text", "mask", "options"),
    [
        ("a", None, {}),
        ("abab" * 3, np.arange(12) < 6, {}),
        ("abab" * 3, np.arange(12) >= 6, {}),
        ("ababa", None, {"folds": 3, "restarts": 3, "ensemble": 3}),
    ],
)
def test_texts_without_two_halves_to_predict_are_read_as_by_contexts(text, mask, options):
    model = PCNN(units=2, connectivity=None, passes=2, **options)
    mixed = Mixed(model).fit(text, mask=mask, alphabet="ab")
    assert mixed.bits_ == Mixed().fit(text, mask=mask, alphabet="ab").bits_
    assert mixed.bits(text) > 0


def test_what_is_scored_is_learned_and_forgotten(model):
    held = LOG[len(LOG) - int(len(LOG) * 0.2) :]
    assert model.bits(held) == pytest.approx(model.validation_bits_)
    assert model.bits(held) == model.bits(held)
    # the second time, the text is known
    assert model.bits([held, held]) < 1.6 * model.bits(held)
    assert model.score(held) == -model.bits(held) / len(held)


def test_bits_are_the_sum_of_what_is_predicted(model):
    text = LOG[-40:]
    bits = -sum(np.log2(model.predict(text[:t])[text[t]]) for t in range(len(text)))
    assert model.bits(text) == pytest.approx(bits)
    marked = np.arange(len(text)) % 3 == 0
    # the weights learn from other symbols alone where some are not to be predicted
    assert model.bits(text, marked) < model.bits(text)
    assert sum(model.predict(text).values()) == pytest.approx(1)


def test_samples_are_drawn_from_the_predictions(model):
    drawn = model.sample(60, seed=3, prompt=LOG[:200])
    assert drawn == model.sample(60, seed=3, prompt=LOG[:200])
    # at a temperature of 1 it may be sure of all sixty
    first, other = (
        model.sample(60, seed=seed, prompt=LOG[:200], temperature=4.0) for seed in (3, 4)
    )
    assert first != other
    assert b" GET /page" in drawn
    likely = model.sample(1, prompt=LOG[:200], temperature=0.01)
    assert likely[0] == max(model.predict(LOG[:200]).items(), key=lambda entry: entry[1])[0]


def test_a_model_of_a_file_is_the_same_bit_for_bit(model, tmp_path):
    model.save(tmp_path / "m")
    back = load(tmp_path / "m")
    assert isinstance(back, Mixed)
    assert (back.bits_, back.validation_bits_) == (model.bits_, model.validation_bits_)
    assert back.predict(LOG[:30]) == model.predict(LOG[:30])
    for text in (LOG[:1], LOG[50:700], LOG[::-1]):
        assert back.bits(text) == model.bits(text)
        assert compress(back, text) == compress(model, text)
    back.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


def test_the_network_of_a_file_can_go_on(tmp_path):
    Mixed(network()).fit(LOG, 0.2, passes=10).save(tmp_path / "m")
    resumed = load(tmp_path / "m").fit(LOG, 0.2, passes=20, resume=True)
    assert resumed.bits_ == Mixed(network()).fit(LOG, 0.2, passes=20).bits_


def test_compressed_files_are_as_long_as_the_bits_say_and_come_back(model):
    for data in (LOG[:1], LOG, LOG * 3, LOG[::-1], b""):
        packed = compress(model, data)
        assert decompress(model, packed) == data
        if data:
            assert len(packed) <= model.bits(data) / 8 + 16
    foreign = LOG[:50] + b"\x00\xff" + LOG[50:70] + b"~"
    assert decompress(model, compress(model, foreign)) == foreign
    seen = []
    compress(model, LOG * 6, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6 * len(LOG), 6 * len(LOG))


def test_damage_and_other_models_are_refused(model):
    packed = compress(model, LOG[:80])
    for k in range(len(packed)):
        with pytest.raises(CorruptedError):
            decompress(model, packed[:k] + bytes([packed[k] ^ 4]) + packed[k + 1 :])
    with pytest.raises(CorruptedError, match="another model"):
        decompress(Mixed().fit(LOG[:-1]), packed)


@pytest.mark.parametrize("text", ["aaaa", "na\u00efve \U0001f600 na\u00efve", "ab"])
def test_characters_and_small_alphabets(text, tmp_path):
    model = Mixed().fit(text)
    model.save(tmp_path / "m")
    assert load(tmp_path / "m").bits(text) == model.bits(text)
    assert decompress(model, compress(model, text.encode())) == text.encode()
    assert set(model.sample(5)) <= set(text)
    assert sum(model.predict(text).values()) == pytest.approx(1)


def test_a_silent_network_has_no_say_and_can_be_trained_further(tmp_path):
    model = Mixed(network(), silent=True).fit(LOG, 0.2)
    alone = Mixed().read(LOG, 0.2)
    assert model.validation_bits_ == alone.validation_bits_
    model.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert repr(loaded) == repr(model)
    assert repr(model).endswith(", silent=True)")
    assert loaded.bits(LOG) == alone.bits(LOG)
    assert decompress(loaded, compress(model, LOG)) == LOG
    assert loaded.model.fit(LOG, 0.2, passes=24, resume=True).training_.passes == 24
    loaded.save(tmp_path / "m")


def test_several_texts_begin_anew_with_what_was_learned(tmp_path):
    parts = [line.encode() for line in LINES]
    model = Mixed(network()).fit(parts[:100], parts[100:])
    assert model.bits(parts[100:]) == model.validation_bits_
    model.save(tmp_path / "m")
    assert load(tmp_path / "m").bits(parts[100:]) == model.validation_bits_


def test_mistakes_are_named():
    with pytest.raises(NotFittedError, match="call fit first"):
        Mixed().bits(b"a")
    with pytest.raises(NotFittedError, match="PCNN has not been fitted"):
        Mixed(network()).read(LOG)
    with pytest.raises(UnseenSymbolError, match="larger `alphabet`"):
        Mixed().fit(b"ab").predict(b"abc")
    with pytest.raises(ValueError, match="without a network there is nothing for seconds to steer"):
        Mixed().fit(b"ab", seconds=3)
    with pytest.raises(ValueError, match="empty"):
        Mixed().fit(b"")
    with pytest.raises(TypeError, match=r"merge the networks, mixed\.model"):
        merge([Mixed().fit(b"ab")])
    with pytest.raises(TypeError, match="a PCNN, CNN or RNN, or None"):
        Mixed(Mixed())
    assert Mixed().fit(b"ab", alphabet=b"c").bits(b"abc") > 0


def test_a_network_trained_since_is_read_again_before_it_is_saved(tmp_path):
    model = Mixed(network()).fit(LOG)
    assert model.model is not None
    model.model.fit(LOG, passes=model.model.passes + 4, resume=True)
    with pytest.raises(ValueError, match="read the text again"):
        model.save(tmp_path / "m")
    model.read(LOG).save(tmp_path / "m")
    assert load(tmp_path / "m").bits(LOG) == model.bits(LOG)


def test_a_reading_that_fails_leaves_none_of_another_alphabet():
    model = Mixed().read(b"abab")
    with pytest.raises(ValueError, match="each mask"):
        model.read(b"xyz", mask=[True])
    with pytest.raises(NotFittedError):
        model.bits(b"xyz")


def damaged(content, change):
    """The file with its tensors and description changed, and the checksum made to fit."""
    of_tensors, of_description = change
    size = int.from_bytes(content[:8], "little")
    description = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][KEY])
    tensors = load_tensors(content)
    tensors |= {name: change(tensors[name]) for name, change in of_tensors.items()}
    description |= {name: change(description[name]) for name, change in of_description.items()}
    del description["checksum"]
    description["checksum"] = storage.checksum(description, tensors)
    return save(tensors, {KEY: json.dumps(description)})


# what each does to the tensors and to the description
CHANGES = {
    "more symbols": ({}, {"symbols": lambda T: T + 1}),
    "fewer symbols": ({}, {"symbols": lambda T: T - 1}),
    "no number": ({}, {"symbols": str}),
    "history": ({"history": lambda packed: packed[:-9]}, {}),
    "foreign symbols": ({}, {"alphabet": lambda symbols: symbols[:-1]}),
    "bounds": ({"bounds": lambda bounds: bounds[::-1].copy()}, {}),
    "kind of bounds": ({"bounds": lambda bounds: bounds.astype(np.float64)}, {}),
    "shape": ({"by_node": lambda w: w[1:]}, {}),
    "not finite": ({"final": lambda w: w * np.nan}, {}),
    "bits": ({}, {"bits": str}),
    "network": ({}, {"network": lambda network: network | {"units": 9}}),
    "silent": ({}, {"silent": str}),
    "first": ({}, {"first": lambda first: first + 1}),
    "end": ({}, {"end": lambda _: 999}),
    "generation": ({}, {"generation": lambda generation: generation + 1}),
    "later": ({}, {"version": lambda version: version + 1}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_does_not_fit_together_is_refused(name, tmp_path):
    Mixed(network()).fit(LOG).save(tmp_path / "m")
    content = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(damaged(content, ({}, {})))
    load(tmp_path / "m")
    (tmp_path / "m").write_bytes(damaged(content, CHANGES[name]))
    with pytest.raises(ModelFileError, match=r"damaged|later version"):
        load(tmp_path / "m")


def test_every_flipped_byte_of_a_file_is_refused(tmp_path):
    Mixed().fit(b"abracadabra").save(tmp_path / "m")
    content = (tmp_path / "m").read_bytes()
    for k in range(0, len(content), 97):
        (tmp_path / "m").write_bytes(content[:k] + bytes([content[k] ^ 16]) + content[k + 1 :])
        with pytest.raises(ModelFileError):
            load(tmp_path / "m")
    metadata, tensors = storage.contents(_written(tmp_path / "m", content))
    assert read("m", metadata, tensors).history.tolist() == [0, 1, 4, 0, 2, 0, 3, 0, 1, 4, 0]


def _written(path, content):
    path.write_bytes(content)
    return path


def test_scikit_learn_takes_mixtures():
    texts = [line.encode() for line in LINES[:40]]
    model = Mixed(PCNN(units=3, passes=2), silent=True)
    copied = sklearn.base.clone(model)
    assert repr(copied) == repr(model)
    assert copied.model is not model.model
    assert model.get_params(deep=False) == {"model": model.model, "silent": True}
    assert model.get_params()["model__units"] == 3
    assert sklearn.base.clone(Mixed()).get_params() == {"model": None, "silent": False}
    found = sklearn.model_selection.GridSearchCV(
        model, {"model__units": [3, 4], "silent": [True, False]}, cv=2
    ).fit(texts)
    assert found.best_estimator_.bits(texts) > 0
    assert set(found.cv_results_["param_model__units"]) == {3, 4}
    scores = sklearn.model_selection.cross_val_score(Mixed(), texts, cv=2)
    assert (scores < 0).all()
    piped = sklearn.pipeline.Pipeline([("last", Mixed())]).fit(texts)
    assert piped.score(texts) == Mixed().fit(texts).score(texts)
    assert piped.set_params(last__silent=True).named_steps["last"].silent


def test_arguments_that_a_mixture_lacks_are_named():
    with pytest.raises(
        ValueError, match="no argument 'units': it has model, silent and model__NAME"
    ):
        Mixed().set_params(units=3)
    with pytest.raises(ValueError, match="no network whose units could be set"):
        Mixed().set_params(model__units=3)
    with pytest.raises(ValueError, match="PCNN has no argument 'unit'"):
        Mixed(network()).set_params(model__unit=3)
    model = Mixed().set_params(model__units=4, model=PCNN(units=3))
    assert model.model is not None
    assert model.model.units == 4
