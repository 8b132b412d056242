"""Files made by hand, and what reading them may cost: counted in bytes, not in seconds."""

import random
import tracemalloc
import zlib
from binascii import crc_hqx
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pathspace.sequences import SequenceModel
from pathspace.sequences.compression import _MAGIC, _fingerprint, _varint

MEBIBYTE = 1 << 20


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail if Python and NumPy together ask for more bytes than that, whether they use them or not."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes"


def stream(
    model: SequenceModel,
    length: int,
    foreign: bytes | None = None,
    code: bytes = b"",
    data: bytes = b"",
) -> bytes:
    """A compressed file whose checksums fit, whatever it claims; `foreign` is what gets deflated."""
    head = _varint(2 * length + (foreign is not None))
    if foreign is not None:
        packed = zlib.compress(foreign, 9)
        head += _varint(len(packed)) + packed
    front = _MAGIC + _fingerprint(model) + crc_hqx(data, 0).to_bytes(2, "little")
    return front + crc_hqx(front + head + code, 0).to_bytes(2, "little") + head + code


def mutants(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Damaged copies: flipped bits, other bytes, cuts, repeated and lost stretches."""
    rng = random.Random(seed)
    changes: list[Callable[[bytearray, int, int], None]] = [
        lambda b, i, _: b.__setitem__(i, b[i] ^ 1 << rng.randrange(8)),
        lambda b, i, _: b.__setitem__(i, rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))),
        lambda b, i, j: b.__delitem__(slice(i, j)),
        lambda b, i, j: b.__setitem__(slice(i, i), b[i:j]),
        lambda b, i, _: b.__delitem__(slice(i, None)),
        lambda b, i, _: b.__setitem__(slice(i, i), rng.randbytes(rng.randrange(1, 9))),
    ]
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            if damaged:
                i = rng.randrange(len(damaged))
                rng.choice(changes)(damaged, i, min(len(damaged), i + rng.randrange(1, 65)))
        if bytes(damaged) != content:
            yield bytes(damaged)
