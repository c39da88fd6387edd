"""Read integer columns of a SQLite table straight from the file's b-tree pages, vectorised with numpy.

Row by row access through ``sqlite3`` makes a Python object of every value and is several times slower on large
profiles (benchmarks/README.md). Only the common case is handled here: an ordinary rowid table whose rows hold
integers or NULL in the wanted columns and fit their pages. Everything else, damage included, raises
:class:`UnsupportedError` and is SQLite's to read or refuse; a property test holds both readers to the same answer.

File format: https://www.sqlite.org/fileformat2.html, sections 1.3 (header), 1.6 (b-tree pages), 2.1 (record format).
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np

NULL = int(np.iinfo(np.int64).min)
"""Stands for SQL NULL in the arrays."""

_LEAF, _INTERIOR = 13, 5
_MAX_DEPTH = 20  # of a SQLite b-tree
_CHUNK_BYTES = 1 << 20  # decoded at a time: what fits the CPU's caches with its temporaries
_PAD = 16  # bytes after a chunk, so that eight-byte loads stay inside the buffer

# Bytes of a value by serial type 0..127: NULL, ints of 1 2 3 4 6 8 bytes, float, constants 0 and 1, reserved, text.
_SIZES = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0] + [(kind - 12) // 2 for kind in range(12, 128)], np.int64)


class UnsupportedError(Exception):
    """This table is for SQLite itself; the message says why."""


def read_columns(path: Path, root_page: int, indexes: list[int]) -> list[np.ndarray]:
    """The columns at ``indexes`` (positions in the stored record) of the table rooted at ``root_page``.

    One int64 array a column, all of the table's length, in rowid order, :data:`NULL` for SQL NULL. ``path`` must be a
    complete database: no WAL or journal beside it that counts. Raises ``UnsupportedError``.
    """
    with path.open("rb", buffering=0) as file:
        header = file.read(100)
        page_size = int.from_bytes(header[16:18], "big")
        page_size = 65536 if page_size == 1 else page_size
        usable = page_size - header[20]
        pages = os.fstat(file.fileno()).st_size // page_size
        leaves = _leaf_pages(file, root_page, page_size, pages)
        per_chunk = max(1, _CHUNK_BYTES // page_size)
        buffer = np.zeros(per_chunk * page_size + _PAD, np.uint8)
        columns = [np.empty(0, np.int64) for _ in indexes]
        rows = 0
        for first in range(0, len(leaves), per_chunk):
            numbers = leaves[first : first + per_chunk]
            chunk = buffer[: len(numbers) * page_size + _PAD]
            _read_pages(file, numbers, page_size, chunk)
            found = _decode(chunk, page_size, usable, indexes, empty=len(leaves) == 1)
            more = len(found[0])
            if rows + more > len(columns[0]):
                # Few large arrays instead of many small ones: fresh pages cost as much as the decoding.
                full = (rows + more) * len(leaves) // (first + len(numbers))
                columns = [_grown(column, rows, full + full // 16 + more) for column in columns]
            for column, values in zip(columns, found, strict=True):
                column[rows : rows + more] = values
            rows += more
    return [column[:rows] for column in columns]


def _grown(column: np.ndarray, rows: int, capacity: int) -> np.ndarray:
    larger = np.empty(capacity, np.int64)
    larger[:rows] = column[:rows]
    return larger


def _leaf_pages(file: io.FileIO, root_page: int, page_size: int, pages: int) -> np.ndarray:
    """Numbers of the table's leaf pages in key order."""
    level = np.array([root_page], np.int64)
    for _ in range(_MAX_DEPTH):
        if level.min() < 1 or level.max() > pages or len(np.unique(level)) != len(level):
            raise UnsupportedError("a page is linked twice or lies outside the file")
        first = int(level[0])
        kind = _page(file, first, page_size)[_start(first)]
        if kind == _LEAF and first != 1:
            return level
        if kind != _INTERIOR:
            raise UnsupportedError("not an ordinary rowid table")
        level = np.concatenate([_children(_page(file, int(page), page_size), int(page)) for page in level])
    raise UnsupportedError("the table's b-tree does not end")


def _start(page: int) -> int:
    """Offset of the b-tree header in a page: page 1 begins with the file's header."""
    return 100 if page == 1 else 0


def _page(file: io.FileIO, page: int, page_size: int) -> bytes:
    file.seek((page - 1) * page_size)
    data = file.read(page_size)
    if len(data) != page_size:
        raise UnsupportedError(f"page {page} is cut off")
    return data


def _children(data: bytes, page: int) -> np.ndarray:
    """Child pages of an interior table page, in key order."""
    start = _start(page)
    if data[start] != _INTERIOR:
        raise UnsupportedError(f"page {page} should be an interior table page")
    raw = np.frombuffer(data, np.uint8)
    cells = int.from_bytes(data[start + 3 : start + 5], "big")
    at = np.frombuffer(data, ">u2", cells, start + 12).astype(np.int64)
    if not cells or at.max() > len(data) - 4:
        raise UnsupportedError(f"page {page} has no cells, or one outside the page")
    left = sum(raw[at + i].astype(np.int64) << (24 - 8 * i) for i in range(4))
    return np.append(left, int.from_bytes(data[start + 8 : start + 12], "big"))


def _read_pages(file: io.FileIO, numbers: np.ndarray, page_size: int, buffer: np.ndarray) -> None:
    """Fill ``buffer`` with the pages one after the other; runs of neighbours are read at once."""
    view = buffer.data
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for first, last in zip(np.append(0, breaks), np.append(breaks, len(numbers)), strict=True):
        file.seek((int(numbers[first]) - 1) * page_size)
        target = view[int(first) * page_size : int(last) * page_size]
        if file.readinto(target) != len(target):
            raise UnsupportedError("the file ends inside the table")


def _decode(buffer: np.ndarray, page_size: int, usable: int, indexes: list[int], *, empty: bool) -> list[np.ndarray]:
    """Columns of all rows in a buffer of leaf pages. Only a table of one page may be ``empty``."""
    bases = np.arange(0, len(buffer) - _PAD, page_size)
    if (buffer[bases] != _LEAF).any():
        raise UnsupportedError("a leaf of the table is no leaf page")
    cells = _u16(buffer, bases + 3)
    if (8 + 2 * cells > usable).any() or (not empty and not cells.all()):
        raise UnsupportedError("a page claims more rows than fit it, or none")
    base = np.repeat(bases, cells)
    slot = base + 8 + 2 * (np.arange(len(base)) - np.repeat(np.cumsum(cells) - cells, cells))
    at = _u16(buffer, slot)
    if (at > usable - 4).any():
        raise UnsupportedError("a row starts outside its page")
    at += base

    # A cell is: payload size, rowid, payload; both numbers are varints (7 bits a byte, high bit = more follows).
    payload = buffer[at].astype(np.int64)
    more = payload > 127
    if more.any():
        low = buffer[at + 1]
        if (low[more] > 127).any():
            raise UnsupportedError("a row of 16 KiB or more")
        payload = np.where(more, (payload & 127) << 7 | low, payload)
    if (payload > usable - 35).any():
        raise UnsupportedError("a row that overflows its page")
    at += more
    at += 1
    more = buffer[at] > 127
    at += 1
    for _ in range(8):
        if not more.any():
            break
        at += more
        more &= buffer[at - 1] > 127
    end = at + payload
    if (end > base + usable).any():
        raise UnsupportedError("a row reaches beyond its page")
    return _columns(buffer, at, end, indexes)


def _columns(buffer: np.ndarray, at: np.ndarray, end: np.ndarray, indexes: list[int]) -> list[np.ndarray]:
    """Columns of the records in ``buffer[at:end]``: header size, a serial type a column, the values."""
    header = buffer[at].astype(np.int64)
    if (header > 127).any() or (header <= max(indexes) + 1).any():
        raise UnsupportedError("a row without some of the columns, or with more than 126")
    value = at + header
    if (value > end).any():
        raise UnsupportedError("a header reaches beyond its row")
    eight = np.ndarray((len(buffer) - 7,), "V8", buffer, 0, (1,))  # the eight bytes at any offset
    found: dict[int, np.ndarray] = {}
    for column in range(max(indexes) + 1):
        kind = buffer[at + 1 + column]
        if (kind > 127).any():
            raise UnsupportedError("a long text before a wanted column")
        size = _SIZES[kind]
        if column in indexes:
            if ((kind == 7) | (kind > 9)).any():
                raise UnsupportedError("a value that is no integer")
            if (value + size > end).any():
                raise UnsupportedError("a value reaches beyond its row")
            raw = eight[value].view(">i8").astype(np.int64)
            raw >>= 64 - 8 * np.maximum(size, 1)
            if not size.all():
                raw = np.where(size == 0, np.where(kind == 0, NULL, kind.astype(np.int64) - 8), raw)
            found[column] = raw
        value += size
    return [found[column] for column in indexes]


def _u16(buffer: np.ndarray, at: np.ndarray) -> np.ndarray:
    return buffer[at].astype(np.int64) << 8 | buffer[at + 1]
