"""The symbol that ends each text, at which samples stop."""

import numpy as np
import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, Mixed, load
from pathspace.sequences.folds import fold_of

WORDS = ["sea", "shore", "shell", "she"] * 15
EVENTS = [["login", "open", "close", "logout"], ["login", "logout"]] * 20


def network():
    return PCNN(units=6, connectivity=None, passes=60, seed=0)


@pytest.mark.parametrize(
    ("texts", "end"),
    [
        (WORDS, "."),
        ([word.encode() for word in WORDS], b"."),
        ([word.encode() for word in WORDS], 46),
        (EVENTS, "<end>"),
        (EVENTS, ("the", 1)),
    ],
)
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.sample(5)
def test_samples_stop_before_it(tmp_path, texts, end, mixture):
    model = Mixed() if mixture else network()
    model.fit(texts, end=end)
    model.save(tmp_path / "m")
    drawn = [model.sample(200, seed=seed) for seed in range(8)]
    assert [load(tmp_path / "m").sample(200, seed=seed) for seed in range(8)] == drawn
    assert max(map(len, drawn)) < 40
    symbols = model.alphabet_.symbols
    stop = symbols[model.alphabet_.end]
    assert stop == (ord(b".") if end == b"." else end)
    assert all(stop not in text for text in drawn)
    # a third of the texts are the most usual one
    assert sum(list(text) in [list(each) for each in texts] for text in drawn) >= 4


def test_a_model_without_it_draws_as_many_as_are_asked_for():
    assert len(Mixed().fit(WORDS).sample(50)) == 50
    assert Mixed().fit(WORDS).alphabet_.end is None


def test_it_is_learned_after_each_text_and_not_scored_unless_it_is_there():
    model = Mixed().fit(WORDS, end=".")
    assert len(model.reading_.memory.history) == sum(map(len, WORDS)) + len(WORDS)
    assert model.predict("shore")["."] > 0.9
    same = Mixed().fit([word + "." for word in WORDS])
    assert model.bits_ == same.bits_
    assert model.bits("shore") == same.bits("shore") < same.bits("shore.")
    held = Mixed().fit(WORDS, ["shore"], end=".")
    assert held.validation_bits_ == same.bits("shore.")


def test_networks_of_mixtures_folds_and_masks_have_it_too():
    mixed = Mixed(network()).fit(WORDS, ["shore"], end=".")
    assert mixed.alphabet_.end == mixed.model.alphabet_.end == mixed.alphabet_.symbols.index(".")
    assert len(mixed.sample(200)) < 40
    assert mixed.model.has_learned(mixed_corpus(mixed))
    folded = PCNN(units=3, passes=4, restarts=2, folds=2, ensemble=2).fit(WORDS, end=".")
    assert folded.alphabet_.end is not None
    masks = [np.zeros(len(word), bool) for word in WORDS]
    # the ends alone are predicted
    assert Mixed().fit(WORDS, mask=masks, end=".").bits_ > 0
    grown = network().partial_fit(WORDS, end=".").partial_fit(WORDS)
    assert grown.fit(WORDS, resume=True, end=".", passes=8).alphabet_.end is not None
    again = Mixed().partial_fit(WORDS, end=".").partial_fit(WORDS)
    assert len(again.reading_.memory.history) >= 2 * (sum(map(len, WORDS)) + len(WORDS))


def mixed_corpus(mixed):
    return fold_of(mixed.alphabet_, WORDS, None, None, None).corpus


def test_the_command_samples_until_it(tmp_path):
    Mixed().fit(WORDS, end=".").save(tmp_path / "m")
    arguments = ["sequence", "sample", str(tmp_path / "m"), "--length", "200"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, len(result.output) < 40) == (0, True)


def test_mistakes_are_named():
    for end in ("", "..", b".", 4):
        with pytest.raises(ValueError, match="end must be a character, as the texts have them"):
            Mixed().fit(WORDS, end=end)
    with pytest.raises(ValueError, match="end must be a byte"):
        Mixed().fit(b"abc", end="c")
    with pytest.raises(ValueError, match="share for validation would hold back the ends"):
        Mixed().fit(WORDS, 0.2, end=".")
    model = network().fit(WORDS, end=".")
    with pytest.raises(ValueError, match=r"begun with the end '\.', got '!'"):
        model.fit(WORDS, end="!", resume=True)
    with pytest.raises(ValueError, match="begun with no end"):
        Mixed(network().fit(WORDS)).read(WORDS, end=".")
    with pytest.raises(ValueError, match=r"begun with the end '\.', got 's'"):
        Mixed(model).read(WORDS).partial_fit(WORDS, end="s")
