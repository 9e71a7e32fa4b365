"""Rows of a mask as bits: a 64k window takes 8 KB a row, and rows are unpacked only a few at a time."""

from collections.abc import Callable

import numpy as np

_SCRATCH = 2**22
"""Bytes of unpacked rows held at a time."""


def pack_rows(length: int, start: int, stop: int, fill: Callable[[np.ndarray, int], None]) -> np.ndarray:
    """Packs rows that are made a few at a time, and takes later keys out of them.

    Args:
        length: T.
        start: first row.
        stop: exclusive end.
        fill: marks keys in bool [rows, T], given the first of its rows; called in order.

    Returns:
        uint8 [stop - start, ceil(T/8)].
    """
    packed = np.empty((stop - start, -(-length // 8)), np.uint8)
    step = max(1, _SCRATCH // length)
    for first in range(start, stop, step):
        allowed = np.zeros((min(step, stop - first), length), bool)
        fill(allowed, first)
        for row, line in enumerate(allowed, first):
            line[row + 1 :] = False
        packed[first - start :][: len(allowed)] = np.packbits(allowed, axis=1)
    return packed


def unpack_rows(packed: np.ndarray, length: int) -> np.ndarray:
    """The bits of packed rows.

    Args:
        packed: uint8 [rows, ceil(T/8)].
        length: T.

    Returns:
        bool [rows, T].
    """
    return np.unpackbits(packed, axis=1, count=length).view(bool)


def mark_fixed(allowed: np.ndarray, start: int, *, local: int, anchors: int) -> None:
    """Marks the window and the anchors of some rows.

    Args:
        allowed: bool [rows, T], changed in place.
        start: the first of the rows.
        local: keys of the window, the row itself included.
        anchors: keys at the start.
    """
    allowed[:, :anchors] = True
    for row, line in enumerate(allowed, start):
        line[max(0, row + 1 - local) : row + 1] = True
