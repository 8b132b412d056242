"""The generators against exact code lengths, and their texts against their own grammar."""

import math

import numpy as np
import pytest

from pathspace.sequences.tasks import TASKS, ImpossibleTextError, alphabet, anbn, music, regret, xor
from sequences.fixture import exact

EXAMPLE = "ab(0123[WZPYCPEEH]456789[HYDVTWATR])cdefghijklmnopqrstuvwxyz\n"
"""The typical line of O13, section 4, which has capitals after the 9."""


def test_the_example_line_of_the_paper_is_one_of_the_task():
    bits = 25 * math.log2(26 / 25) + math.log2(26) + 2 * math.log2(5 * 26**9) + 8 * math.log2(5 / 4)
    assert alphabet.true_bits(EXAMPLE) == pytest.approx(bits, abs=1e-10)


def test_true_code_lengths_agree_with_exact_values():
    values = exact()["true_bits"]
    for text, bits in values["alphabet"].items():
        assert alphabet.true_bits(text) == pytest.approx(bits, abs=1e-10)
    for text, bits in values["music"].items():
        assert music.true_bits(text) == pytest.approx(bits, abs=1e-10)
    block = "a" * 1500 + "\n" + "b" * 1500 + "\n"
    expected = values["anbn_per_block(1024..2048 inclusive)"]
    assert anbn.true_bits(block * 3) == pytest.approx(3 * expected, abs=1e-10)
    assert regret("anbn", block, expected + 2) == pytest.approx(2)


def test_xor_mask_agrees_with_exact_values():
    values = exact()["xor_mask"]
    assert xor.mask(values["text"]).astype(int).tolist() == values["chi"]
    assert xor.true_bits(values["text"]) == 0
    assert xor.mask("").tolist() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(TASKS))
def test_generated_texts_are_possible_and_of_the_paper_s_size(name):
    rng = np.random.default_rng(3)
    text = TASKS[name].generate(rng)
    sizes = {
        "alphabet": (1000, 67),
        "alphabet-9": (1000, 67),
        "music": (2700, 14),
        "xor": (10_000, 6),
        "anbn": (20, 3),
    }
    assert (text.count("\n"), len(set(text))) == sizes[name]
    assert math.isfinite(TASKS[name].true_bits(text))
    assert text != TASKS[name].generate(rng)
    assert text == TASKS[name].generate(np.random.default_rng(3))


def test_code_lengths_are_the_entropies_on_average():
    """The mean of -log2 p over draws of p is the entropy, whatever the text."""
    rng = np.random.default_rng(7)
    text = alphabet.generate(rng, 4000)

    def entropy(p):
        return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    digit = entropy(1 / 5) + 9 * math.log2(26) / 5
    expected = 26 * (entropy(1 / 26) + 10 * digit / 26)
    assert alphabet.true_bits(text) / 4000 == pytest.approx(expected, rel=0.05)
    assert expected * 1000 == pytest.approx(97_942, abs=1)
    text = alphabet.generate(rng, 4000, after_last=False)
    expected -= digit
    assert alphabet.true_bits(text, after_last=False) / 4000 == pytest.approx(expected, rel=0.05)
    assert expected * 1000 == pytest.approx(88_760, abs=1)
    # one choice less for each block
    less = alphabet.true_bits(text) - alphabet.true_bits(text, after_last=False)
    assert less == pytest.approx(-math.log2(4 / 5) * text.count("("))
    text = music.generate(rng, 4000)
    expected = math.log2(5) + (3 + 2 + 3 + 1 + 4) / 5 * math.log2(3)
    assert music.true_bits(text) / 4000 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("alphabet", "abc\n"),
        ("alphabet", "abcdefghijklmnopqrstuvwxyz(01)\n"),
        ("alphabet", "abcdefghijklmnopqrstuvwxyz(0[AB]123456789)\n"),
        ("alphabet-9", EXAMPLE),
        ("music", "c2 c4 |"),
        ("music", "c2 c2 |\n"),
        ("music", "c2 c4\n"),
        ("music", "c2 c4 |\ng2 g4 |\n"),
        ("anbn", "a" * 1500 + "\n" + "b" * 1501 + "\n"),
        ("anbn", "ab\n"),
        ("anbn", "a" * 10 + "\n" + "b" * 10 + "\n"),
        ("xor", "X0X1 0 0 0 0 0 0 0 0=0\n"),
        ("xor", "X0 1 0 0 0 0X0 0 0 0=0\n"),
        ("xor", "no line"),
    ],
)
def test_impossible_texts_are_refused(name, text):
    with pytest.raises(ImpossibleTextError):
        TASKS[name].true_bits(text)


def test_xor_lines_are_balanced_and_errors_are_counted():
    text = xor.generate(np.random.default_rng(0), lines=2000, T=40)
    answers = np.array([int(line[-1]) for line in text.splitlines()])
    assert 0.45 < answers.mean() < 0.55
    assert xor.mask(text).sum() == 2000
    certain = np.stack([1 - answers, answers], axis=1)
    assert xor.error_rate(certain, answers) == 0
    assert xor.error_rate(certain, 1 - answers) == 1
    assert math.isnan(xor.error_rate(np.zeros((0, 2)), np.zeros(0)))
    with pytest.raises(ValueError, match="at least 10"):
        xor.generate(np.random.default_rng(0), T=9)
