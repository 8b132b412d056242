"""The classes a user meets: fit, bits, predict, sample, save, load, merge, resume, restarts."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.base
import sklearn.model_selection
import torch

from pathspace import sequences
from pathspace.sequences import CNN, PCNN, RNN, Mixed, NotFittedError, UnseenSymbolError
from pathspace.sequences.passes import forward
from pathspace.sequences.storage import VERSION
from pathspace.sequences.text import Alphabet, Corpus

TEXT = "a cat sat on the mat; " * 12


@pytest.fixture(scope="module")
def fitted():
    return PCNN(units=8, passes=40).fit(TEXT)


@pytest.mark.parametrize("kind", [PCNN, CNN, RNN])
@pytest.mark.parametrize("text", [TEXT, TEXT.encode()])
def test_fit_learns_and_every_method_works(kind, text):
    model = kind(units=8, connectivity=2, passes=80, seed=1).fit(text)
    uniform = len(text) * math.log2(len(set(text)))
    assert model.bits(text) < uniform / 2
    assert model.score(text) == pytest.approx(-model.bits(text) / len(text))
    prediction = model.predict(text[:5])
    assert set(prediction) == set(text)
    assert sum(prediction.values()) == pytest.approx(1)
    drawn = model.sample(30, seed=3)
    assert type(drawn) is type(text)
    assert len(drawn) == 30
    assert drawn == model.sample(30, seed=3)
    assert model.sample(30, seed=3, temperature=5.0) != model.sample(30, seed=4, temperature=5.0)


def test_predict_agrees_with_the_forward_pass(fitted):
    x = fitted.alphabet_.encode(TEXT)
    pi = forward(fitted.parameters_, Corpus.of([x], len(fitted.alphabet_))).pi
    prediction = fitted.predict(TEXT[:17])
    assert np.abs(np.array(list(prediction.values())) - pi[17]).max() < 1e-12


def test_a_trained_model_continues_what_it_has_seen():
    model = PCNN(units=10, passes=300).fit("abcdefgh" * 40)
    assert model.sample(8, prompt="abcdefgh" * 3, temperature=0.01) == "abcdefgh"


@pytest.mark.parametrize("kind", [PCNN, RNN])
def test_saved_and_loaded_models_are_the_same(kind, tmp_path):
    text, held = TEXT[:150], TEXT[150:]
    model = kind(units=6, passes=30, seed=2).fit(text, validation=held)
    path = tmp_path / "model.safetensors"
    model.save(path)
    loaded = sequences.load(path)
    assert type(loaded) is kind
    assert loaded.get_params() == model.get_params()
    assert loaded.bits(TEXT) == model.bits(TEXT)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    # going on from the file is going on as if nothing had happened
    whole = kind(units=6, passes=60, seed=2).fit(text, validation=held)
    resumed = loaded.fit(text, validation=held, passes=60, resume=True)
    assert np.array_equal(resumed.training_.model.w, whole.training_.model.w)
    assert np.array_equal(resumed.parameters_.tau, whole.parameters_.tau)


def test_damaged_and_foreign_files_are_refused(fitted, tmp_path):
    path = tmp_path / "model"
    fitted.save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(sequences.ModelFileError, match="is no model of pathspace"):
        sequences.load(path)
    path.write_bytes(content.replace(b'version\\": %d' % VERSION, b'version\\": 9'))
    with pytest.raises(sequences.ModelFileError, match="later version"):
        sequences.load(path)
    path.write_bytes(content.replace(b'units\\": 8', b'units\\": 9'))
    with pytest.raises(sequences.ModelFileError, match="damaged"):
        sequences.load(path)
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(sequences.ModelFileError, match="checksum"):
        sequences.load(path)
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3)}, path)
    with pytest.raises(sequences.ModelFileError, match="no pathspace sequence model"):
        sequences.load(path)
    from safetensors.torch import save_file as save_torch

    save_torch({"w": torch.zeros(3, dtype=torch.bfloat16)}, path)  # which NumPy has not
    with pytest.raises(sequences.ModelFileError, match="is no model of pathspace"):
        sequences.load(path)
    with pytest.raises(FileNotFoundError):
        sequences.load(tmp_path / "nothing")


def test_merged_models_predict_the_geometric_mean(fitted):
    models = [PCNN(units=n, connectivity=2, passes=30, seed=n).fit(TEXT) for n in (3, 5, 4)]
    context = TEXT[:31]
    for weights in (None, [0.5, 0.2, 0.7]):
        merged = sequences.merge(models, weights)
        product = np.ones(len(set(TEXT)))
        for model, c in zip(models, weights or [1 / 3] * 3, strict=True):
            product *= np.array(list(model.predict(context).values())) ** c
        expected = product / product.sum()
        assert np.abs(np.array(list(merged.predict(context).values())) - expected).max() < 1e-12
    assert merged.parameters_.units == 12
    # it can be trained on
    before = merged.bits(TEXT)
    assert merged.fit(TEXT, passes=10, resume=True).bits(TEXT) < before


def test_models_that_do_not_fit_together_are_not_merged(fitted):
    with pytest.raises(ValueError, match="no network"):
        sequences.merge([])
    for foreign, name in ((fitted, "PCNN"), (["m.safetensors"], "str"), (None, "NoneType")):
        with pytest.raises(
            TypeError, match=rf"merge takes a list of networks, \[model, other\], got {name}"
        ):
            sequences.merge(foreign)
    with pytest.raises(ValueError, match="share kind"):
        sequences.merge([fitted, CNN(units=3, passes=2).fit(TEXT)])
    other = PCNN(units=3, passes=2).fit(TEXT.upper())
    with pytest.raises(ValueError, match="alphabet"):
        sequences.merge([fitted, other])
    with pytest.raises(ValueError, match="one finite weight"):
        sequences.merge([fitted, fitted], [1.0])
    with pytest.raises(NotFittedError):
        sequences.merge([fitted, PCNN()])


def test_restarts_keep_the_best_and_do_not_depend_on_processes():
    arguments = {"units": 5, "connectivity": 2, "passes": 24, "restarts": 3, "heat": 0, "seed": 5}
    text, held = TEXT[:130], TEXT[130:]
    alone = [
        PCNN(**(arguments | {"restarts": 1, "seed": seed})).fit(text, held) for seed in (5, 6, 7)
    ]
    best = min(alone, key=lambda model: model.training_.result_bits)
    serial = PCNN(**arguments).fit(text, held)
    assert np.array_equal(serial.parameters_.w, best.parameters_.w)


@pytest.mark.slow
def test_restarts_in_two_processes_give_the_same():
    arguments = {"units": 5, "connectivity": 2, "passes": 24, "restarts": 4, "heat": 8, "seed": 5}
    arguments |= {"folds": 2, "ensemble": 2}
    serial, parallel = PCNN(**arguments).fit(TEXT), PCNN(**arguments, jobs=2).fit(TEXT)
    assert np.array_equal(serial.parameters_.w, parallel.parameters_.w)


@pytest.mark.slow
def test_a_script_needs_no_guard_against_its_own_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from pathspace.sequences import PCNN\n"
        "print(PCNN(units=3, passes=2, restarts=2, jobs=2).fit('abab').training_.passes)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("2\n", "")


@pytest.mark.slow
def test_a_restart_whose_direction_is_not_finite_ends_there_and_not_the_others():
    letters = np.random.default_rng(0).choice(list("abcd"), 400)
    text = "".join(letters) + "abcd" * 50
    arguments = {"units": 6, "metric": "rutsd", "damping": 0.0, "passes": 60}
    alone = PCNN(**arguments, seed=2).fit(text, 0.1)
    with pytest.warns(RuntimeWarning, match=r"ended at pass \d+: .* damping"):
        breaks = PCNN(**arguments, seed=3).fit(text, 0.1)
    assert breaks.training_.broke_off
    assert 0 < breaks.training_.passes < alone.training_.passes == 60
    assert alone.training_.result_bits < breaks.training_.result_bits
    for jobs in (1, 2):
        both = PCNN(**arguments, seed=2, restarts=2, heat=0, jobs=jobs).fit(text, 0.1)
        assert np.array_equal(both.parameters_.w, alone.parameters_.w)
        assert not both.training_.broke_off
    with pytest.warns(RuntimeWarning, match=r"a merged training ended early: .* damping"):
        merged = PCNN(**arguments, seed=2, restarts=2, ensemble=2, heat=0).fit(text, 0.1)
    assert merged.training_.broke_off


@pytest.mark.parametrize("mask", [[True] * 8, [[True] * 4], [True, True], [[True] * 4] * 3])
def test_masks_are_as_many_as_texts(mask):
    for model, validation in (
        (PCNN(units=3), None),
        (PCNN(units=3), 0.5),
        (PCNN(units=3, folds=2, restarts=2, ensemble=2), None),
        (Mixed(), None),
    ):
        with pytest.raises(ValueError, match="a list of 2 texts needs a list of 2 masks"):
            model.fit(["abab", "baba"], validation, mask=mask)


@pytest.mark.parametrize("mask", [True, [[True, False]] * 4, [True] * 3, [True] * 5])
def test_a_mask_of_another_shape_than_its_text_is_refused(mask):
    for model in (PCNN(units=3), Mixed()):
        with pytest.raises(ValueError, match="one entry for each symbol"):
            model.fit("abab", mask=mask)
        with pytest.raises(ValueError, match="one entry for each symbol"):
            model.fit("abab", 0.5, mask=mask)


@pytest.mark.parametrize("wrong", [math.nan, 2, "x", None])
def test_a_mask_of_anything_but_booleans_is_refused(wrong, fitted):
    assert fitted.bits("a ca", [0, 1.0, np.bool_(True), False]) == fitted.bits(
        "a ca", [False, True, True, False]
    )
    message = f"a mask holds True or False for each symbol, got {wrong} at position 2"
    mask = np.array([0, 1, wrong, 0], dtype=object)
    with pytest.raises(ValueError, match=message):
        fitted.bits("a ca", mask)
    with pytest.raises(ValueError, match=message):
        PCNN().fit(["abab", "baba"], mask=[[True] * 4, mask])
    with pytest.raises(ValueError, match=message):
        Mixed().fit("abab", "baba", validation_mask=mask)


def test_a_mask_without_its_text_is_refused():
    model, marks = PCNN(units=3, passes=2), [True, False] * 10
    for validation in (None, 0, 0.5):
        with pytest.raises(ValueError, match="validation_mask is the mask of a validation text"):
            model.fit("ab" * 20, validation, validation_mask=marks)
    with pytest.raises(ValueError, match="folds take turns"):
        PCNN(units=3, passes=2, folds=2, restarts=2, ensemble=2).fit(
            "ab" * 20, validation_mask=marks
        )


def test_halves_of_surrogate_pairs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="halves of surrogate pairs"):
        PCNN(units=3, passes=2).fit("\ude00a\ud83d" * 5)
    text = b"caf\xe9 " * 5  # not UTF-8
    model = PCNN(units=3, passes=2).fit(text.decode(errors="surrogateescape"))
    model.save(tmp_path / "model")
    assert sequences.load(tmp_path / "model").alphabet_ == model.alphabet_


def test_heats_drop_restarts_but_not_the_leader():
    model = PCNN(units=5, passes=60, restarts=6, heat=10, seed=1).fit(TEXT)
    single = PCNN(units=5, passes=60, seed=1).fit(TEXT)
    assert model.training_.passes == 60
    assert model.training_.log_likelihood >= single.training_.log_likelihood - 5


def test_several_texts_masks_and_a_share_for_validation():
    texts = ["ab" * 20, "abc" * 15, "c"]
    model = PCNN(units=4, passes=30).fit(texts, validation=0.25)
    # each by itself pays for the uniform part anew
    assert model.bits(texts) < sum(model.bits(text) for text in texts)
    assert model.training_.result_bits < math.inf
    same = PCNN(units=4, passes=30).fit(texts, validation=np.float32(0.25))
    assert np.array_equal(same.parameters_.w, model.parameters_.w)
    mask = [t % 2 == 1 for t in range(40)]
    masked = PCNN(units=4, passes=30).fit(texts[0], mask=mask)
    assert masked.bits(texts[0], mask=mask) < 10
    with pytest.raises(ValueError, match="one entry for each symbol"):
        PCNN().fit("abc", mask=[True])
    with pytest.raises(ValueError, match="no symbol to be predicted"):
        PCNN().fit("abc", mask=[False] * 3)
    with pytest.raises(ValueError, match="too short"):
        PCNN().fit("abc", validation=0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        PCNN().fit("abc", validation=1.5)
    for empty in ("", [], ["", ""]):
        with pytest.raises(ValueError, match="the validation text is empty"):
            PCNN().fit("abc", validation=empty)
    with pytest.raises(ValueError, match="the text is empty"):
        PCNN().fit("", validation="abc")
    with pytest.raises(TypeError, match="generator is read only once"):
        PCNN().fit(text for text in texts)


def test_tiny_and_empty_texts_are_learned_or_clearly_refused(fitted):
    for empty in ("", b"", [], ["", ""]):
        with pytest.raises(ValueError, match="the text is empty: there is no symbol to learn from"):
            PCNN().fit(empty)
    for tiny in ("x", "xx", "x" * 50, b"\x00"):
        model = PCNN(units=3, passes=12).fit(tiny)
        assert model.bits(tiny) == 0
        assert model.predict(tiny[:1]) == {tiny[0]: 1.0}
        assert model.sample(4) == tiny[:1] * 4
    two = PCNN(units=3, passes=12).fit("xy")
    assert math.isfinite(two.bits("yx"))
    with pytest.raises(TypeError, match="all str or all bytes"):
        PCNN().fit(["a", b"b"])
    with pytest.raises(TypeError, match="reads str"):
        fitted.bits(b"a")
    with pytest.raises(ValueError, match="the text is empty: give one with a symbol"):
        fitted.bits("")


@pytest.mark.parametrize(
    "foreign", [None, 5, Path("log"), [1, 2, 3], np.arange(3), [None], [["ab"]]]
)
def test_what_is_no_text_is_refused_with_how_to_make_one(foreign, fitted):
    told = r"^a text is a str or bytes, got \w+: of a file give path\.read_bytes\(\), of whole numbers "
    of_tokens = () if isinstance(foreign, list | np.ndarray) else (PCNN().fit, Mixed().fit)
    for refuses in (*of_tokens, fitted.bits, fitted.score, fitted.predict):
        with pytest.raises(TypeError, match=told + r"bytes\(numbers\)"):
            refuses(foreign)
    with pytest.raises(TypeError, match=told):
        PCNN().fit("abab", [foreign])
    if foreign is not None:  # for none
        with pytest.raises(TypeError, match=told):
            PCNN().fit("abab", alphabet=foreign)
        with pytest.raises(TypeError, match=told):
            fitted.sample(3, prompt=foreign)


def test_what_is_as_good_as_a_text_is_one():
    model = PCNN(units=3, passes=4).fit(b"abab")
    for same in (bytearray(b"abab"), memoryview(b"abab"), np.bytes_(b"abab"), [bytearray(b"abab")]):
        assert PCNN(units=3, passes=4).fit(same).bits(same) == model.bits(b"abab")
    assert model.predict(bytearray(b"ab")) == model.predict(b"ab")
    assert model.sample(9, prompt=memoryview(b"ab")) == model.sample(9, prompt=b"ab")
    assert PCNN(units=3, passes=4).fit(bytearray(b"abab"), mask=[True, False] * 2).bits(b"a") > 0
    texts = ["abab", "ba"]
    column = np.array(texts)
    assert PCNN(units=3, passes=4).fit(column, tokens=False).bits(column) == pytest.approx(
        PCNN(units=3, passes=4).fit(texts).bits(texts)
    )


def test_a_fit_that_fails_leaves_no_network_of_another_alphabet():
    model = PCNN(units=3, passes=4).fit("abab")
    with pytest.raises(ValueError, match="each mask"):
        model.fit("xyz", mask=[True])
    with pytest.raises(NotFittedError):
        model.predict("x")


def test_a_resumed_fit_gets_no_more_symbols():
    model = PCNN(units=3, passes=2).fit("abab")
    model.fit("abab", passes=4, resume=True, alphabet="ba")
    with pytest.raises(UnseenSymbolError, match="'c' at position 1"):
        model.fit("abab", passes=6, resume=True, alphabet="ac")


def test_unseen_symbols_cost_their_escape_and_are_no_context(fitted):
    assert math.isfinite(fitted.bits("a z"))
    with pytest.raises(UnseenSymbolError, match="'z' at position 2"):
        fitted.predict("a z")
    wide = PCNN(units=4, passes=20).fit(TEXT, alphabet="xyz")
    assert len(wide.alphabet_) == len(set(TEXT)) + 3
    assert math.isfinite(wide.bits("a zebra".replace("e", "y").replace("b", "x").replace("r", "z")))


def test_scikit_learn_can_clone_and_set(fitted):
    copy = sklearn.base.clone(fitted)
    assert copy.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError, match="call fit first"):
        copy.bits("a")
    assert copy.set_params(units=3).units == 3
    with pytest.raises(ValueError, match="no argument 'width'"):
        copy.set_params(width=3)
    assert sklearn.base.clone(RNN(units=4)).get_params()["units"] == 4


def test_scikit_learn_can_search_among_networks_by_their_score():
    texts = [TEXT, TEXT[::-1], TEXT, TEXT[::-1]]
    search = sklearn.model_selection.GridSearchCV(
        PCNN(), {"units": [2, 3], "passes": [1, 20]}, cv=2, error_score="raise"
    )
    best = search.fit(texts).best_estimator_
    assert best.passes == 20
    scores = sklearn.model_selection.cross_val_score(best, texts, cv=2)
    assert scores.mean() == pytest.approx(search.best_score_)


def test_more_connections_than_units_are_all():
    few, full = (PCNN(units=2, connectivity=c, passes=2).fit(TEXT) for c in (3, None))
    assert np.array_equal(few.parameters_.tau, full.parameters_.tau)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_network_cannot_go_on_with_other_arguments_than_it_was_begun_with(loaded, tmp_path):
    model = PCNN(units=4, connectivity=9, passes=2).fit(TEXT)
    if loaded:
        model.save(tmp_path / "m")
        model = sequences.load(tmp_path / "m")
    for wrong, before in (
        ({"units": 5}, "units=4"),
        ({"squash": "logistic"}, "squash='tanh'"),
        ({"connectivity": 2}, "connectivity=None"),
        ({"rate": 0.5, "seed": 7}, "rate=None, seed=0"),
    ):
        now = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        kept = model.get_params()
        with pytest.raises(
            ValueError, match=f"begun with {before} cannot go on with {now}: fit anew"
        ):
            model.set_params(**wrong).fit(TEXT, passes=4, resume=True)
        model.set_params(**kept)
    assert model.training_.passes == 2
    # all units, in other words
    assert (
        model.set_params(connectivity=None).fit(TEXT, passes=4, resume=True).training_.passes == 4
    )


def test_numbers_of_numpy_are_kept_in_files(tmp_path):
    grid: Any = {
        "units": np.int64(3),
        "passes": np.int64(4),
        "restarts": np.int64(2),
        "seed": np.int64(1),
    }
    grid |= {"rate": np.float32(0.25), "damping": np.float32(0.5), "grow": np.bool_(False)}
    model = PCNN(**grid).fit(TEXT, 0.1, checkpoint=tmp_path)
    model.save(tmp_path / "m")
    plain = PCNN(**{name: value.item() for name, value in grid.items()}).fit(TEXT, 0.1)
    loaded = sequences.load(tmp_path / "m")
    assert loaded.bits(TEXT) == plain.bits(TEXT)
    assert repr(loaded) == repr(plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "at least one unit"),
        ({"units": 3, "connectivity": 0}, "connectivity 0"),
        ({"metric": "x"}, "unknown metric"),
        ({"squash": "relu"}, "unknown squash"),
        ({"restarts": 0}, "restarts"),
        ({"jobs": 0}, "jobs"),
        ({"ensemble": 2}, "ensemble between 1 and restarts"),
        ({"restarts": 3, "ensemble": 2}, "give one to fit"),
        # what a file would not hold, so that the trained network would be lost
        (
            {"passes": math.inf, "seconds": 0.1},
            "passes must be a whole number of at least 0, got inf",
        ),
        ({"jobs": 1.0}, "jobs must be a whole number"),
        # what would leave out looks at the validation text, or all of them, without a word
        ({"validate_every": 2.5}, "validate_every must be a whole number"),
        ({"validate_every": math.nan}, "validate_every must be a whole number"),
        ({"heat": -1}, "heat must be a whole number of at least 0, got -1"),
        ({"seed": None}, "seed must be a whole number of at least 0, got None"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        (
            {"connectivity": 2.5},
            "connectivity must be a whole number, or None for all units, got 2.5",
        ),
        ({"damping": None}, "damping must be at least 0 and finite, got None"),
        ({"prior_writing": "a"}, "prior_writing must be at least 0 and finite, got 'a'"),
        ({"reach": "a"}, "reach must be above 0 and finite, or None for no bound, got 'a'"),
        ({"seconds": "a"}, "seconds must be at least 0, or None for no bound, got 'a'"),
        ({"patience": "a"}, "patience must be at least 0, or None for no end of it, got 'a'"),
        (
            {"rate": "a"},
            "rate must be above 0 and finite, or None for one by the number of units, got 'a'",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PCNN(**({"passes": 1} | arguments)).fit("abcabc")
    with pytest.raises(ValueError, match="no whole rbp metric"):
        RNN(metric="rbp", passes=2).fit("abcabc")


@pytest.mark.parametrize("seed", [-1, 2.5, None])
def test_seeds_and_passes_of_a_call_are_checked_too(seed, fitted):
    with pytest.raises(
        ValueError, match=f"the seed must be a whole number of at least 0, got {seed}"
    ):
        fitted.sample(3, seed=seed)
    if seed is not None:
        with pytest.raises(
            ValueError, match=f"passes must be a whole number of at least 0, got {seed}"
        ):
            PCNN().fit("abab", passes=seed)


def test_alphabets_encode_and_decode_any_text():
    for text in ("häß\U0001f600\ud800x", bytes(range(256))):
        alphabet = Alphabet.of([text])
        assert alphabet.decode(alphabet.encode(text)) == text
        assert alphabet.encode(text[:0]).size == 0


@pytest.mark.parametrize("model", [PCNN(units=2), Mixed()], ids=["a network", "contexts"])
@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.bits("a"),
        lambda model: model.score("a"),
        lambda model: model.predict("a"),
        lambda model: model.code_lengths("a"),
        lambda model: model.code_lengths("a", frozen=True),
        lambda model: model.stream(),
        lambda model: model.sample(3),
        lambda model: model.sample(3, prompt="a"),
        lambda model: model.save("nowhere.safetensors"),
        lambda model: sequences.compress(model, b"a"),
        lambda model: sequences.Records(model),
    ],
)
def test_every_use_asks_for_a_fit_first(model, use):
    with pytest.raises(NotFittedError, match="has not been fitted yet: call fit first"):
        use(model)
