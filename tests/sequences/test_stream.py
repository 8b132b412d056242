"""Bits of each symbol, symbols that come one by one, lines, and what a model does not know."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, Mixed, load

LOG = "".join(f"10:{k // 60:02}:{k % 60:02} GET /page{k * k % 7}.html 200\n" for k in range(120))


@pytest.fixture(scope="module", params=["contexts", "network", "mixed", "tokens"])
def model(request):
    network = PCNN(units=4, passes=12)
    models = {"contexts": Mixed(), "network": network, "mixed": Mixed(network), "tokens": Mixed()}
    return models[request.param].fit(LOG, tokens="words" if request.param == "tokens" else None)


def test_the_bits_of_symbols_add_up(model):
    texts = [LOG[:50], LOG[:70], "9" + LOG[:33]]
    found = model.code_lengths(texts)
    symbols = model.alphabet_.sequences(texts).parts
    assert [len(bits) for bits in found] == [len(part) for part in symbols]
    assert sum(bits.sum() for bits in found) == pytest.approx(model.bits(texts))
    assert model.code_lengths(texts[0]).sum() == pytest.approx(model.bits(texts[0]))


def test_frozen_models_learn_nothing_from_what_they_score(model):
    one = model.code_lengths(LOG[:60], frozen=True)
    again, other, third = model.code_lengths([LOG[:60], LOG[30:90], LOG[:60]], frozen=True)
    assert one.tolist() == again.tolist() == third.tolist()
    assert other.sum() > 0
    p = model.frozen().predict()
    assert p.sum() == pytest.approx(1)
    first = model.alphabet_.numbers(model.alphabet_.sequence(LOG[:60]))[0][0]
    assert one[0] == pytest.approx(-math.log2(p[first]), rel=1e-3)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_stream_predicts_what_it_pays_for(model, frozen):
    stream, symbols = model.stream(frozen=frozen), model.alphabet_.sequence(LOG[:90])
    before = model.bits(LOG[:40])
    is_network = isinstance(model, PCNN)
    for t, symbol in enumerate(symbols[:25]):
        p = stream.predict()
        assert sum(p.values()) == pytest.approx(1)
        # networks are mixed with the uniform distribution where they are scored
        share = 1 / (t + 2) if is_network and not frozen else 0.0
        paid = (1 - share) * p[symbol] + share / len(p)
        assert stream.push(symbol) == pytest.approx(-math.log2(paid), rel=1e-3)
    stream.end()
    assert set(stream.predict()) == set(model.alphabet_.symbols)
    assert model.bits(LOG[:40]) == before


@pytest.mark.parametrize("frozen", [False, True])
def test_a_stream_costs_the_bits_of_its_symbols(model, frozen):
    stream = model.stream(frozen=frozen)
    symbols = model.alphabet_.sequence(LOG[:90])
    costs = [stream.push(symbol) for symbol in symbols]
    assert costs == pytest.approx(model.code_lengths(LOG[:90], frozen=frozen).tolist())


def test_streams_of_bytes_and_tokens():
    stream = Mixed().fit(b"abab" * 9).stream()
    assert stream.push(97) > 0
    assert stream.push(b"b") > 0
    assert stream.push(b"z") == pytest.approx(math.log2(4) + 8)
    events = Mixed().fit(["open", "close"] * 9, tokens=True).stream()
    events.push("open")
    assert events.predict()["close"] > 0.5
    assert events.push("crash") == pytest.approx(math.log2(3) + 48)
    long = Mixed().fit("ab").stream()
    assert sum(long.push("ab"[k % 2]) for k in range(3000)) < 300


@pytest.mark.parametrize(
    ("fitted", "text", "spelled"),
    [(b"abab", b"aZb", 8), ("abab", "aZb", math.log2(0x110000)), ([1, 2, 1, 2], [1, 77, 2], 24)],
)
def test_a_symbol_that_the_model_does_not_know_costs_its_place_and_its_spelling(
    fitted, text, spelled
):
    for model in (Mixed().fit(fitted), PCNN(units=3, passes=4).fit(fitted)):
        known = [text[0], text[2]] if isinstance(text, list) else text[:1] + text[2:]
        assert model.bits(text) == pytest.approx(model.bits(known) + 2 + spelled)
        assert model.code_lengths(text)[1] == pytest.approx(2 + spelled)
        assert model.score(text) == pytest.approx(-model.bits(text) / 3)
        assert model.bits(text, mask=[True, False, True]) == pytest.approx(model.bits(known))
        assert model.bits(text, mask=[False, True, False]) == pytest.approx(2 + spelled)
        assert model.bits(text[1:2]) == pytest.approx(1 + spelled)
        with pytest.raises(ValueError, match="one entry for each symbol"):
            model.bits(text, mask=[True])
        with pytest.raises(ValueError, match="no symbol to be predicted"):
            model.bits(text, mask=[False] * 3)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strange = LOG[:460].replace("\n10:00:05 GET /page4.html 200\n", "\nkernel panic \x01\n", 1)
    (tmp_path / "new").write_text(strange)

    def invoke(*words, status=0):
        result = CliRunner().invoke(app, ["sequence", *words])
        assert result.exit_code == status, result.output
        return result.output

    return invoke


@pytest.mark.parametrize("fit", [LOG, LOG.encode()])
@pytest.mark.parametrize("more", [(), ("--frozen",), ("--per-symbol",)])
def test_the_strange_line_is_on_top(run, more, fit, tmp_path):
    Mixed().fit(fit).save(tmp_path / "m")
    top = [
        json.loads(line)
        for line in run("lines", "m", "new", "--top", "2", "--json", *more).splitlines()
    ]
    assert [top[0]["line"], top[0]["text"]] == [6, "kernel panic \x01"]
    assert top[0]["bits"] > top[1]["bits"]
    every = run("lines", "m", "new", *more).splitlines()
    assert len(every) == len((tmp_path / "new").read_text().splitlines())
    assert every[0].endswith("1  10:00:00 GET /page0.html 200")


def test_lines_of_tokens_and_of_networks(run, tmp_path):
    for model in (
        Mixed().fit(LOG, tokens="words"),
        Mixed().fit(LOG, tokens="lines"),
        PCNN(units=3, passes=4).fit(LOG),
    ):
        model.save(tmp_path / "m")
        assert "kernel panic" in run("lines", "m", "new", "--top", "2", "--per-symbol")
    Mixed().fit("abc def").save(tmp_path / "m")  # which knows no newline, and next to nothing
    assert len(run("lines", "m", "new", "--top", "3").splitlines()) == 3


def test_the_sum_of_lines_is_that_of_the_file(run, tmp_path):
    model = Mixed().fit(LOG)
    model.save(tmp_path / "m")
    (tmp_path / "new").write_text(LOG[:400])
    found = [json.loads(line)["bits"] for line in run("lines", "m", "new", "--json").splitlines()]
    assert np.sum(found) == pytest.approx(model.bits(LOG[:400]))


def test_a_file_with_an_unknown_byte_is_scored(run, tmp_path):
    Mixed().fit(LOG.encode()).save(tmp_path / "m")
    figures = json.loads(run("bits", "m", "new", "--json"))
    assert figures["unknown_symbols"] == sum(
        symbol not in LOG for symbol in (tmp_path / "new").read_text()
    )
    assert math.isfinite(figures["bits"])
    assert "unknown to the model (fit --alphabet FILE knows them)" in run("bits", "m", "new")


def test_numbers_are_masked_where_the_model_was_fitted_so(run, tmp_path):
    (tmp_path / "old").write_text(LOG)
    fit = ("fit", "old", "--passes", "0", "-q", "-o")
    run(*fit, "masked", "--mask-numbers")
    model = load(tmp_path / "masked")
    assert model.bits(b"0:0:0 GET /page0.html 0\n") < 10
    lines = ["23:59:59 GET /page8.html 777", "10:00:00 PUT /page1.html 200"]
    (tmp_path / "new").write_text("\n".join([*LOG.splitlines()[:9], *lines]) + "\n")
    found = {}
    for name in ("masked", "plain"):
        if name == "plain":
            run(*fit, name)
        told = run("lines", name, "new", "--frozen", "--json").splitlines()
        found[name] = {each["text"]: each["bits"] for each in map(json.loads, told)}
    # the text that is shown has its numbers, and they surprise nobody
    number, word = lines
    assert found["masked"][number] < 0.2 * found["plain"][number]
    assert found["masked"][word] > 5 * found["masked"][number]
    total = json.loads(run("bits", "masked", "new", "--json"))["bits"]
    assert total < sum(found["plain"].values())
    # --resume goes on with what the first fit was told
    run(*fit, "masked", "--resume", "--passes", "2")
    assert load(tmp_path / "masked").model.told_["mask_numbers"]
    run(*fit, "network", "--mask-numbers", "--no-context", "--passes", "1")
    assert load(tmp_path / "network").told_["mask_numbers"]
    run(*fit, "network", "--no-context", "--passes", "1")
    result = CliRunner().invoke(
        app, ["sequence", *fit, "network", "--resume", "--mask-numbers", "--passes", "2"]
    )
    assert result.exit_code == 2
    assert "begun without --mask-numbers" in " ".join(result.output.split())
