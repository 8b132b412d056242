"""Contexts in a text, compiled: their hashes, and the longest match.

What precedes a symbol is told by the last symbols, the words, and the place in the line:

    orders            the last 0 to 6 symbols
    words             the word so far, and the one before; letters and digits make words
    line              lines end with newlines, fields with blanks; a field has a number from 0 on
    the symbol above  that of the line before, as far into the field of the same number
    guess             the symbol that followed the longest match of what was read last, at least 6 symbols long

Alphabet of this module: t symbols read so far.
"""

from __future__ import annotations

from pathspace.sequences.kernels.machine_code import njit

OTHER, LETTER, BLANK, NEWLINE = range(4)
"""Roles of symbols."""

ORDERS = 7
BASIC = ORDERS + 2
"""Contexts of the last symbols and of words."""
CONTEXTS = BASIC + 3
SHORTEST = 6
"""Symbols that a match must have."""
STATES = 1 + 16 * 4

# places of `Memory.place`: t; where this text began; where the match goes on, its length and last
# misses; the hashes of the word so far and of the one before; the state of the match; where in
# `last` this place belongs, or -1
T, BEGIN, POINTER, LENGTH, MISSES, WORD, WORD_BEFORE, STATE, HERE = range(9)
# the hash of the word before that; where this line began; the number of the field; 1 + where the
# symbol above is, 0 for none; which of the two rows of fields is that of this line
WORD_BEFORE_THAT, LINE, FIELD, ABOVE, ROW = range(9, 14)
_ROWS = 14
_FIELDS = 32
"""From _ROWS on: where the fields of this line and of the one before began, for so many fields each; 0 for nowhere."""
PLACES = _ROWS + 2 * _FIELDS


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def combine(a, b):
    """Return a hash of two numbers."""
    h = (a ^ (b * -7046029254386353131)) * 6364136223846793005
    return h ^ ((h >> 29) & 0x7FFFFFFFF)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def back(m, distance):
    """Return 1 + the symbol so far back, 0 before the text."""
    at = m.place[T] - distance
    return m.history[at] + 1 if at >= m.place[BEGIN] else 0


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def basic_contexts(m, role):
    """Write the hashes of the last symbols and of words."""
    h = 1
    m.keys[0] = h
    for d in range(1, ORDERS):
        h = combine(h, back(m, d))
        m.keys[d] = combine(h, d)
    before = back(m, 1)
    if before == 0:
        m.place[WORD] = m.place[WORD_BEFORE] = m.place[WORD_BEFORE_THAT] = 0
    elif role[before - 1] == LETTER:
        m.place[WORD] = combine(m.place[WORD], before)
    elif m.place[WORD] != 0:
        m.place[WORD_BEFORE_THAT] = m.place[WORD_BEFORE]
        m.place[WORD_BEFORE] = m.place[WORD]
        m.place[WORD] = 0
    m.keys[ORDERS] = combine(combine(m.place[WORD], before), ORDERS)
    words = combine(combine(m.place[WORD], m.place[WORD_BEFORE]), before)
    m.keys[ORDERS + 1] = combine(words, ORDERS + 1)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _begin_line(m, row):
    """Begin a line, whose fields are kept in this row."""
    t = m.place[T]
    begin = _ROWS + _FIELDS * row
    for f in range(_FIELDS):
        m.place[begin + f] = 0
    m.place[begin] = t
    m.place[ROW] = row
    m.place[LINE] = t
    m.place[FIELD] = 0


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _begin_field(m):
    """Begin the next field of a line."""
    m.place[FIELD] += 1
    f = m.place[FIELD]
    m.place[ABOVE] = 0
    if f >= _FIELDS:
        return
    m.place[_ROWS + _FIELDS * m.place[ROW] + f] = m.place[T]
    above = m.place[_ROWS + _FIELDS * (1 - m.place[ROW]) + f]
    if above > 0:
        m.place[ABOVE] = above + 1


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def follow_line(m, role):
    """Go on in the line, by the symbol that was read last."""
    before = back(m, 1)
    if before == 0:
        for place in range(LINE, PLACES):
            m.place[place] = 0
        _begin_line(m, 0)
    elif role[before - 1] == NEWLINE:
        m.place[ABOVE] = m.place[LINE] + 1
        _begin_line(m, 1 - m.place[ROW])
    elif role[before - 1] == BLANK:
        _begin_field(m)
    elif m.place[ABOVE] > 0:
        m.place[ABOVE] += 1


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _symbol_above(m, further):
    """Return 1 + the symbol of the line before that is so much further than the one above, 0 if there is none."""
    at = m.place[ABOVE] - 1 + further
    return m.history[at] + 1 if m.place[ABOVE] > 0 and at < m.place[LINE] else 0


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def line_contexts(m):
    """Write the hashes of the place in the line; of a text without lines, those of further symbols and words."""
    before = back(m, 1)
    word = m.place[WORD]
    k = BASIC
    if m.place[LINE] > m.place[BEGIN]:
        field = min(m.place[FIELD], 255) + 1
        above = _symbol_above(m, 0)
        m.keys[k] = combine(combine(combine(field, above), before), k)
        m.keys[k + 1] = combine(combine(combine(field, word), before), k + 1)
        pair = combine(above, _symbol_above(m, 1))
        m.keys[k + 2] = combine(combine(combine(pair, word), before), k + 2)
        return
    m.keys[k] = combine(combine(back(m, 2), back(m, 3)), -k)
    m.keys[k + 1] = combine(combine(combine(word, m.place[WORD_BEFORE_THAT]), before), -k - 1)
    m.keys[k + 2] = combine(combine(m.keys[ORDERS - 1], back(m, ORDERS)), -k - 2)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _go_on(m, t):
    """Go on with the match by one symbol; a wrong guess here and there (a digit of the time) does not end it."""
    missed = m.history[m.place[POINTER]] != m.history[t - 1]
    m.place[LENGTH] = 0 if missed else m.place[LENGTH] + 1
    m.place[MISSES] = (m.place[MISSES] << 1 | missed) & 15
    m.place[POINTER] += 1


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _shared_length(m, t, q):
    """Return how many symbols before q are those before t, up to 32."""
    most = min(q, t - m.place[BEGIN], 32)
    length = 0
    while length < most and m.history[q - 1 - length] == m.history[t - 1 - length]:
        length += 1
    return length


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def match(m):
    """Go on with the match, or find a longer one; return the symbol it lets expect, or -1."""
    t = m.place[T]
    if t == m.place[BEGIN]:
        m.place[POINTER] = m.place[LENGTH] = m.place[MISSES] = 0
    m.place[HERE] = -1
    if t - m.place[BEGIN] < SHORTEST:
        return -1
    if m.place[POINTER] > 0:
        _go_on(m, t)
    h = 7
    for d in range(1, SHORTEST + 1):
        h = combine(h, m.history[t - d])
    m.place[HERE] = (h >> 7) & (len(m.last) - 1)
    if m.place[LENGTH] < 16:
        q = m.last[m.place[HERE]]
        length = _shared_length(m, t, q)
        if length >= SHORTEST and length > m.place[LENGTH]:
            m.place[POINTER] = q
            m.place[LENGTH] = length
            m.place[MISSES] = 0
    return m.history[m.place[POINTER]] if m.place[POINTER] > 0 else -1


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def state_of_match(length, misses):
    """Return 1 to 64: 16 steps of the length, the higher the wider, times up to three misses of the last four."""
    step = 0
    while length > 8:
        length >>= 1
        step += 1
    count = (misses & 1) + (misses >> 1 & 1) + (misses >> 2 & 1) + (misses >> 3 & 1)
    return 1 + 4 * min(length + step, 15) + min(count, 3)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def expected_digit(tree, guess, v, k):
    """Return the digit that leads from node v, after k decisions, to the guess; -1 if the guess is not behind it."""
    if guess < 0 or k >= tree.depth[guess] or tree.node[guess, k] != v:
        return -1
    return tree.digit[guess, k]
