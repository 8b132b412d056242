"""Symbols that are no characters: event names, numbers, words and lines."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, Mixed, UnseenSymbolError, compress, decompress, load, merge

EVENTS = ["login", "open", "close"] * 20
PITCHES = [60, 64, 67] * 20


class Column:
    """What a column of pandas is to a fit."""

    dtype, ndim = object, 1

    def __init__(self, items):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return Column(self.items[at])

    def tolist(self):
        return self.items


class Missing:
    """As pandas' NA, which is neither equal nor unequal."""

    def __eq__(self, other):
        return self

    __ne__ = __eq__
    __hash__ = object.__hash__

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


class Table(Column):
    columns = ("a",)


def same_model(events):
    """The bits of the same sequence written in characters, which says nothing of words."""
    codes = {event: "!#$%"[k] for k, event in enumerate(sorted(set(events)))}
    text = "".join(codes[event] for event in events)
    return Mixed().fit(text).bits(text)


@pytest.mark.parametrize(
    "given",
    [
        PITCHES,
        tuple(PITCHES),
        np.array(PITCHES),
        np.array(PITCHES, np.uint8),
        Column(PITCHES),
    ],
)
def test_numbers_are_symbols(given):
    model = Mixed().fit(given)
    assert model.alphabet_.symbols == (60, 64, 67)
    assert model.bits(given) == pytest.approx(same_model(PITCHES))
    assert max(model.predict(given[:5]).items(), key=lambda entry: entry[1])[0] == 67
    assert model.score(given) == pytest.approx(-model.bits(given) / 60)


@pytest.mark.parametrize(
    "given",
    [
        EVENTS,
        np.array(EVENTS),
        np.array(EVENTS, object),
        Column(EVENTS),
        tuple(EVENTS),
    ],
)
def test_strings_are_symbols_where_it_is_said(given):
    model = Mixed().fit(given, tokens=True)
    assert model.alphabet_.symbols == ("close", "login", "open")
    assert model.bits(given) == Mixed().fit(EVENTS, tokens=True).bits(EVENTS)
    prediction = model.predict(["login", "open", "close", "login"])
    assert max(prediction.items(), key=lambda entry: entry[1])[0] == "open"
    assert sum(prediction.values()) == pytest.approx(1)
    assert model.predict("login") == model.predict(["login"])
    drawn = model.sample(7, prompt=["login"])
    assert type(drawn) is list
    assert set(drawn) <= set(EVENTS)


@pytest.mark.parametrize("column", [np.array(EVENTS), Column(EVENTS)])
@pytest.mark.parametrize("model", [Mixed(), PCNN(units=3, passes=2)])
def test_a_column_of_strings_is_ambiguous(model, column):
    with pytest.raises(ValueError, match="tokens=True for tokens, tokens=False for texts"):
        model.fit(column)
    assert len(Mixed().fit(column[:3], tokens=False).alphabet_) == len(set("loginopenclose"))


def test_columns_of_pandas_are_sequences():
    pandas = pytest.importorskip("pandas")
    for column in (
        pandas.Series(EVENTS),
        pandas.Series(EVENTS, dtype="category"),
        pandas.Index(EVENTS),
    ):
        assert Mixed().fit(column, tokens=True).predict("login")["open"] > 0.5
        with pytest.raises(ValueError, match="tokens=True"):
            Mixed().fit(column)
    assert Mixed().fit(pandas.Series(PITCHES)).predict([60])[64] > 0.5
    with pytest.raises(ValueError, match="missing"):
        Mixed().fit(pandas.Series(["a", pandas.NA]), tokens=True)


def test_lists_of_strings_are_texts_and_those_of_single_characters_symbols():
    texts = ["she sells", "sea shells"]
    assert Mixed().fit(texts).alphabet_.symbols == "".join(sorted(set("".join(texts))))
    model = Mixed().fit(list("abcabc" * 4))
    assert model.alphabet_.symbols == ("a", "b", "c")
    assert model.bits(list("abc")) == pytest.approx(Mixed().fit("abcabc" * 4).bits("abc"))


@pytest.mark.parametrize("mode", [None, True])
@pytest.mark.parametrize("several", [[[1, 2], [3, 1, 2]], [np.array([1, 2]), np.array([3, 1, 2])]])
def test_lists_of_lists_are_several_sequences(several, mode):
    model = Mixed().fit(several, tokens=mode)
    texts = Mixed().fit(["!#", "$!#"])
    assert model.bits(several) == pytest.approx(texts.bits(["!#", "$!#"]))
    rows = np.array([[1, 2], [3, 1]])
    assert Mixed().fit(rows).bits(rows) == pytest.approx(
        Mixed().fit(["!#", "$!"]).bits(["!#", "$!"])
    )


def test_any_hashable_is_a_symbol(tmp_path):
    notes = [("c", 1), ("e", 2), b"rest", 2.5, True] * 6
    model = Mixed().fit(notes)
    model.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.alphabet_ == model.alphabet_
    assert loaded.predict(notes[:3]) == model.predict(notes[:3])
    odd = Mixed().fit([frozenset("a"), frozenset("b")] * 5)
    assert odd.bits([frozenset("a")]) > 0
    with pytest.raises(
        TypeError, match=r"tokens of str, bytes, int.*got frozenset: fit to str\(token\)"
    ):
        odd.save(tmp_path / "n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, None], r"position 1 is missing \(None\): drop it"),
        ([1.0, math.nan], r"position 1 is missing \(nan\)"),
        ([1, Missing()], "missing"),
        ([1, {}], "must be hashable.*got dict at position 1"),
        ({1: 2}, "a dict has no order"),
        ({1, 2}, "a set has no order"),
        (Table("a"), "give one of them"),
        ([1, [2]], r"a list at position 1"),
        (np.zeros((2, 2, 2)), "an array of 3 axes"),
        (iter([1, 2]), "read only once"),
    ],
)
def test_what_is_no_sequence_of_symbols_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Mixed().fit(given)


def test_tokens_are_not_told_from_a_text():
    with pytest.raises(TypeError, match=r"got str: give \[symbol, \.\.\.\], text\.split\(\)"):
        Mixed().fit("she sells", tokens=True)
    with pytest.raises(
        ValueError, match="tokens must be True, False, 'words', 'lines' or None, got 'word'"
    ):
        Mixed().fit("she sells", tokens="word")  # pyright: ignore[reportArgumentType]
    model = Mixed().fit(EVENTS, tokens=True)
    with pytest.raises(TypeError, match="got str"):
        model.bits("log")
    with pytest.raises(UnseenSymbolError, match="symbol 'x' at position 1 is not one of the 3"):
        Mixed(PCNN(units=3, passes=2).fit(EVENTS, tokens=True)).read(["open", "x"])
    assert Mixed().fit(EVENTS, tokens=True, alphabet=["x"]).bits(["x", "open"]) > 0
    with pytest.raises(ValueError, match="reads tokens: fit another one"):
        compress(model, b"open")
    with pytest.raises(ValueError, match="reads tokens: fit another one"):
        decompress(model, compress(Mixed().fit(b"open"), b"open"))


def test_networks_learn_tokens_and_keep_them_in_files(tmp_path):
    network = PCNN(units=4, passes=30).fit(EVENTS, 0.2, tokens=True, mask=[True] * len(EVENTS))
    assert network.bits(EVENTS) < 0.5 * len(EVENTS) * math.log2(3)
    network.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.predict(["login"]) == network.predict(["login"])
    assert loaded.fit(EVENTS, 0.2, passes=34, resume=True).training_.passes == 34
    assert merge([network, network]).predict(["login"])["open"] > 0.5
    folded = PCNN(units=3, passes=4, folds=2, restarts=2, ensemble=2).fit(
        [EVENTS, EVENTS[:9]], tokens=True
    )
    assert folded.bits(EVENTS) > 0


def test_words_and_lines_of_texts():
    text = "she sells sea shells, she says.\n" * 8
    model = Mixed().fit(text, tokens="words")
    assert set(model.alphabet_.symbols) == {
        "she",
        "sells",
        "sea",
        "shells",
        "says",
        ",",
        ".",
        " ",
        "\n",
    }
    assert model.predict("she sells")[" "] > 0.5
    assert model.predict(["she", " ", "sells"]) == model.predict("she sells")
    assert isinstance(model.sample(9), str)
    assert model.bits(text.encode()) == model.bits(text)
    lines = Mixed().fit("open\nclose\n" * 9, tokens="lines")
    assert lines.alphabet_.symbols == ("close", "open")
    assert lines.sample(3, prompt="open").count("\n") == 2
    with pytest.raises(ValueError, match="words are those of UTF-8 text"):
        Mixed().fit(b"\xff", tokens="words")


def test_many_kinds():
    kinds = 3000
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.permutation(kinds), np.tile(rng.integers(0, kinds, 50), 40)])
    model = Mixed().fit(x)
    assert len(model.alphabet_) == kinds
    assert model.bits(x[-50:]) < 50
    assert model.sample(1, prompt=x[-50:])[0] in model.alphabet_.symbols


@pytest.mark.parametrize("kind", ["words", "lines"])
def test_the_command_reads_words_and_lines(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text("page a\npage b\n" * 40)

    def run(*words, status=0):
        result = CliRunner().invoke(app, ["sequence", *words])
        assert result.exit_code == status, result.output
        return result

    fit = ("fit", "log", "-o", "m", "--passes", "2", "--units", "3", "-q")
    figures = json.loads(run(*fit, "--tokens", kind, "--json").stdout)
    assert figures.get("baseline_bits_per_symbol", {}).keys() <= {"bzip2", "xz"}
    bits = json.loads(run("bits", "m", "log", "--json").stdout)
    assert bits["symbols"] == (320 if kind == "words" else 80)
    assert (
        run("bits", "m", "log", "--after", "page a" if kind == "lines" else "page").exit_code == 0
    )
    following = json.loads(run("predict", "m", "page a", "--json").stdout)["next"][0][0]
    assert following == ("\n" if kind == "words" else "page b")
    sample = run("sample", "m", "--length", "3", "--prompt", "page a\n").stdout_bytes
    assert set(sample.decode().split()) <= {"page", "a", "b"}
    assert run(*fit, "--resume", "--passes", "4").exit_code == 0
    assert "leave out --tokens" in run(*fit, "--resume", "--tokens", "bytes", status=2).output
    assert "choose from bytes" in run(*fit, "--tokens", "letters", status=2).output
    assert "give one of the two" in run(*fit, "--text", "--tokens", "words", status=2).output


def test_the_command_reads_models_of_lists(tmp_path):
    Mixed().fit(PITCHES).save(tmp_path / "m")
    (tmp_path / "notes").write_text("\n".join(map(str, PITCHES)))
    scored = CliRunner().invoke(
        app, ["sequence", "bits", str(tmp_path / "m"), str(tmp_path / "notes"), "--json"]
    )
    assert json.loads(scored.stdout)["symbols"] == len(PITCHES)
    predicted = CliRunner().invoke(
        app, ["sequence", "predict", str(tmp_path / "m"), "60", "--json"]
    )
    assert json.loads(predicted.stdout)["next"][0][0] == 64
    drawn = CliRunner().invoke(app, ["sequence", "sample", str(tmp_path / "m"), "--length", "2"])
    assert {int(line) for line in drawn.stdout.split("\n")} <= set(PITCHES)
