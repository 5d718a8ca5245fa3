"""All-zero rows and columns, from the bits that say which elements are zero. A chunk is whole rows or a piece of one.

The notes on a matrix are uint64 words: [0] is 1 once every column has been seen non-zero, then a bit a column that has been,
then, where rows are longer than a chunk, a word a row that counts its all-zero pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ampscope.probe.stats.jit import jit
from ampscope.probe.stats.vector import GROUP, bits_set

CHUNK = 1 << 16
"""Elements a thread takes at a time."""
_ALL, _ONE, _NONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1), np.uint64(0)
_COLUMNS = 1


@jit()
def note_starts(shapes: Any) -> Any:
    """Return where the notes on each matrix begin, and at last how many words there are; int64 [n + 1]."""
    starts = np.zeros(len(shapes) + 1, np.int64)
    for t in range(len(shapes)):
        height, width = shapes[t, 0], shapes[t, 1]
        words = _COLUMNS + (width + GROUP - 1) // GROUP + (height if width > CHUNK else 0)
        starts[t + 1] = starts[t] + (words if height else 0)
    return starts


@jit()
def _row_is_blank(blanks: Any, first: Any, last: Any) -> Any:
    """Whether the bits first … last - 1 are all set."""
    i, end = first // GROUP, (last - 1) // GROUP
    head = _ALL << np.uint64(first % GROUP)
    tail = _ALL >> np.uint64((GROUP - last % GROUP) % GROUP)
    if i == end:
        return (blanks[i] & head & tail) == (head & tail)
    if (blanks[i] & head) != head:
        return False
    for k in range(i + 1, end):
        if blanks[k] != _ALL:
            return False
    return (blanks[end] & tail) == tail


@jit()
def _see(blanks: Any, first: Any, n: Any, columns: Any) -> Any:
    """Note the non-zero ones among n elements from bit `first` on as columns 0 … n - 1; return how many were not noted yet."""
    shift = np.uint64(first % GROUP)
    k = first // GROUP
    fresh = 0
    for j in range((n + GROUP - 1) // GROUP):
        word = blanks[k + j] >> shift
        if shift:
            word |= blanks[k + j + 1] << (np.uint64(GROUP) - shift)
        word = ~word
        if n - j * GROUP < GROUP:
            word &= _ALL >> np.uint64(GROUP - (n - j * GROUP))
        fresh += int(bits_set(word & ~columns[j]))
        columns[j] |= word
    return fresh


@jit()
def note(begin: Any, n: Any, zeros: Any, width: Any, blanks: Any, notes: Any) -> Any:
    """Note a chunk of n elements from element `begin` of a matrix on, `zeros` of them zero; return its all-zero rows.

    A piece of a row is noted only.
    """
    words = (width + GROUP - 1) // GROUP
    if width > CHUNK:
        row, column = begin // width, begin % width
        if zeros == n:
            notes[_COLUMNS + words + row] += _ONE
        elif not notes[0]:
            _see(blanks, 0, n, notes[_COLUMNS + column // GROUP :])
        return 0
    if zeros == n:
        return n // width
    if zeros == 0:
        notes[0] = _ONE
        return 0
    empty = 0
    if zeros >= width:
        for first in range(0, n, width):
            empty += _row_is_blank(blanks, first, first + width)
    if not notes[0]:
        left = width
        for j in range(words):
            left -= np.int64(bits_set(notes[_COLUMNS + j]))
        for first in range(0, n, width):
            left -= _see(blanks, first, width, notes[_COLUMNS:])
            if left == 0:
                notes[0] = _ONE
                break
    return empty


@jit()
def join_notes(width: Any, notes: Any, others: Any) -> None:
    """Add another thread's notes."""
    columns = _COLUMNS + (width + GROUP - 1) // GROUP
    for k in range(min(columns, len(notes))):
        notes[k] |= others[k]
    for k in range(columns, len(notes)):
        notes[k] += others[k]


@jit()
def empty_lines(height: Any, width: Any, notes: Any) -> Any:
    """Return the all-zero rows among those longer than a chunk, and all all-zero columns."""
    words = (width + GROUP - 1) // GROUP
    cols = width
    for j in range(words):
        cols -= np.int64(bits_set(notes[_COLUMNS + j]))
    rows = 0
    if width > CHUNK:
        pieces = np.uint64((width + CHUNK - 1) // CHUNK)
        for r in range(height):
            rows += notes[_COLUMNS + words + r] == pieces
    return rows, 0 if notes[0] else cols
