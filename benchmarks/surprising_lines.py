"""How many odd lines put into real logs are found by their bits, and by how rare a template of drain3 is.

The first 1,000 lines of each log are learned. Into the others 20 lines are put: ten messages of
other programs behind the header of a line of the log, and ten lines in which a word is another word
of the log. BGL has alarms of its own; the first field of a line, which names them, is left out.
Prints, for each way to rank lines, the share of odd ones among the first 20 and the average
precision, over two seeds.

The logs are NAME/NAME_2k.log of github.com/logpai/loghub, in one folder. Without drain3 (`pip
install drain3`) its rows are left out.

    python benchmarks/surprising_lines.py FOLDER
"""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pathspace.sequences import Mixed

MESSAGES = (
    b"segfault at 7f3a ip 00007f3a sp 00007ffd error 4 in libc.so",
    b"kernel: Out of memory: Kill process 4242 (java) score 911",
    b"Accepted password for root from 10.0.0.66 port 4444 ssh2",
    b"audit: user backdoor added to group wheel by uid=0",
    b"firewall disabled by operator",
    b"certificate verification failed: self signed certificate",
    b"disk /dev/sda1 is full, 0 bytes available",
    b"checksum mismatch in block 77, data may be corrupted",
    b"configuration file was changed while running",
    b"clock stepped backwards by 3600 seconds",
)
HEADERS = {"OpenSSH": 4, "Apache": 6, "Linux": 4, "HDFS": 4, "Zookeeper": 4}
"""Fields of the header of each log."""
LEARNED = 1000
FIRST = 20
_WORD = re.compile(rb"[A-Za-z]{4,}")

Scores = dict[str, list[float]]


def lines_of(folder: Path, name: str) -> list[bytes]:
    """Return the lines of a log."""
    content = (folder / f"{name}_2k.log").read_bytes()
    return [line.rstrip(b"\r") for line in content.split(b"\n") if line]


def masked(line: bytes) -> bytes:
    """Return a line with a 0 in the place of each number."""
    return re.sub(rb"[0-9]+", b"0", line)


def odd_lines(lines: list[bytes], fields: int, rng: random.Random) -> Iterator[bytes]:
    """Yield 20 odd lines for a log, whose lines begin with so many fields of a header."""
    later = lines[LEARNED:]
    words = sorted({word for line in lines for word in _WORD.findall(line)})
    for message in MESSAGES:
        header = rng.choice(later).split(b" ")[:fields]
        yield b" ".join([*header, message])
    count = 0
    while count < len(MESSAGES):
        line = rng.choice(later)
        begin = len(b" ".join(line.split(b" ")[:fields]))
        places = [word for word in _WORD.finditer(line) if word.start() > begin]
        if not places:
            continue
        place, other = rng.choice(places), rng.choice(words)
        if other == place.group():
            continue
        changed = line[: place.start()] + other + line[place.end() :]
        if changed not in lines:
            count += 1
            yield changed


def rarest_field(bits: np.ndarray, line: bytes) -> float:
    """Return the most bits that a field of a line takes."""
    parts = re.finditer(rb"[^ \t]+[ \t]*", line)
    return max((float(bits[part.start() : part.end()].sum()) for part in parts), default=0.0)


def surprise(train: list[bytes], test: list[bytes]) -> Scores:
    """Return the scores of lines by their bits."""
    model = Mixed().fit(b"\n".join(train) + b"\n", alphabet=bytes(range(256)))
    whole = [line + b"\n" for line in test]
    ends = np.cumsum([len(line) for line in whole])[:-1]
    learning = np.split(model.code_lengths(b"".join(whole)), ends)
    return {
        "bits per symbol, frozen": [bits.mean() for bits in model.code_lengths(whole, frozen=True)],
        "bits per symbol": [bits.mean() for bits in learning],
        "bits of the line": [bits.sum() for bits in learning],
        "bits of the rarest field": [
            rarest_field(bits, line) for bits, line in zip(learning, test, strict=True)
        ],
    }


def rarity(train: list[bytes], test: list[bytes]) -> Scores:
    """Return the scores of lines by how rare their template of drain3 is."""
    module = import_module("drain3")

    def learned() -> Any:
        miner = module.TemplateMiner()
        for line in train:
            miner.add_log_message(line.decode("latin-1"))
        return miner

    def frozen(miner: Any, line: str) -> float:
        found = miner.match(line)
        return -float(found.size) if found else 0.0

    going_on, fixed = learned(), learned()
    return {
        "drain3": [
            -going_on.add_log_message(line.decode("latin-1"))["cluster_size"] for line in test
        ],
        "drain3, frozen": [frozen(fixed, line.decode("latin-1")) for line in test],
    }


def precisions(scores: list[float], odd: list[bool]) -> tuple[float, float]:
    """Return the share of odd lines among the first 20, and the average precision."""
    ranked = np.asarray(odd)[np.argsort(-np.asarray(scores), kind="stable")]
    share = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float(ranked[:FIRST].mean()), float(share[ranked].mean())


def put_into(
    lines: list[bytes], odd: Iterator[bytes], rng: random.Random
) -> tuple[list[bytes], list[bool]]:
    """Return lines with odd ones at random places, and which these are."""
    found, is_odd = list(lines), [False] * len(lines)
    for line in odd:
        at = rng.randrange(len(found) + 1)
        found.insert(at, line)
        is_odd.insert(at, True)
    return found, is_odd


def experiments(folder: Path) -> Iterator[tuple[str, list[bytes], list[bytes], list[bool]]]:
    """Yield the name of each log, the lines to learn, the others, and which of these are odd."""
    for name, fields in HEADERS.items():
        lines = lines_of(folder, name)
        for seed in (0, 1):
            rng = random.Random(seed)
            odd = list(odd_lines(lines, fields, rng))
            yield name, lines[:LEARNED], *put_into(lines[LEARNED:], iter(odd), rng)
    lines = lines_of(folder, "BGL")
    alarms = [not line.startswith(b"- ") for line in lines]
    messages = [line.split(b" ", 1)[1] for line in lines]
    calm = [line for line, alarm in zip(messages[:LEARNED], alarms, strict=False) if not alarm]
    yield "BGL", calm, messages[LEARNED:], alarms[LEARNED:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rankings: list[Callable[[list[bytes], list[bytes]], Scores]] = [surprise]
    if find_spec("drain3"):
        rankings.append(rarity)
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, train, test, odd in experiments(folder):
        for ranking in rankings:
            plain = ranking(train, test)
            without = ranking([masked(line) for line in train], [masked(line) for line in test])
            scores = plain | {f"numbers masked, {way}": values for way, values in without.items()}
            for way, values in scores.items():
                found[way][name].append(precisions(values, odd))
    for way, by_log in found.items():
        print(way)
        for name, pairs in by_log.items():
            first, average = np.mean(pairs, axis=0)
            print(f"    {name:10} {first:.2f} / {average:.2f}")


if __name__ == "__main__":
    main()
