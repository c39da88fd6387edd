"""The page reader gives what SQLite gives, or declines."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.nsysdb import pages

INT = st.one_of(
    st.none(),
    st.sampled_from(
        [0, 1, -1, 127, 128, -128, -129, 2**15, 2**23, -(2**23) - 1, 2**31, 2**47, -(2**47) - 1, 2**63 - 1]
    ),
    st.integers(-(2**63) + 1, 2**63 - 1),
)
ODD = st.one_of(INT, st.floats(allow_nan=False), st.text("a1\0é😀", max_size=5), st.binary(max_size=5))


def table(path: Path, rows: list[tuple], *, page_size: int = 512, ddl: str = "CREATE TABLE t (a, b, c)") -> int:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous=OFF")
        db.execute(f"PRAGMA page_size={page_size}")
        db.execute(ddl)
        db.executemany("INSERT INTO t VALUES (?,?,?)", rows)
        db.commit()
        return db.execute("SELECT rootpage FROM sqlite_master WHERE name = 't'").fetchone()[0]


def expected(rows: list[tuple], indexes: list[int]) -> list[list[int]]:
    return [[pages.NULL if row[i] is None else row[i] for row in rows] for i in indexes]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(INT, INT, INT), max_size=60),
    indexes=st.sampled_from([[0], [2], [0, 1, 2], [2, 0]]),
    page_size=st.sampled_from([512, 1024, 4096]),
)
def test_integers_and_nulls(tmp_path: Path, rows: list[tuple], indexes: list[int], page_size: int) -> None:
    root = table(tmp_path / "t.sqlite", rows, page_size=page_size)
    got = pages.read_columns(tmp_path / "t.sqlite", root, indexes)
    assert [column.tolist() for column in got] == expected(rows, indexes)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(ODD, INT, ODD), min_size=1, max_size=20))
def test_other_types_are_declined_not_guessed(tmp_path: Path, rows: list[tuple]) -> None:
    root = table(tmp_path / "t.sqlite", rows)
    try:
        (got,) = pages.read_columns(tmp_path / "t.sqlite", root, [0])
    except pages.UnsupportedError:
        assert any(not isinstance(row[0], int | None) for row in rows)
        return
    assert [got.tolist()] == expected(rows, [0])


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
def test_many_pages_and_rowids_of_every_length(tmp_path: Path, page_size: int) -> None:
    rows = [(i, i * i, -i) for i in range(20_000)]
    file = tmp_path / "t.sqlite"
    root = table(file, rows, page_size=page_size)
    with closing(sqlite3.connect(file)) as db:  # other tables' pages in between, holes, very large and negative rowids
        db.execute("DELETE FROM t WHERE a % 7 = 0")
        db.execute("CREATE TABLE u (a)")
        db.executemany("INSERT INTO u VALUES (?)", ((i,) for i in range(5000)))
        for rowid in (2**62, -5, 2**40):
            db.execute("INSERT INTO t (rowid, a, b, c) VALUES (?, 1, 2, 3)", (rowid,))
        db.commit()
        wanted = list(db.execute("SELECT a, c FROM t ORDER BY rowid"))
    got = pages.read_columns(file, root, [0, 2])
    assert list(zip(got[0].tolist(), got[1].tolist(), strict=True)) == wanted


@pytest.mark.parametrize(
    ("ddl", "row"),
    [
        ("CREATE TABLE t (a PRIMARY KEY, b, c) WITHOUT ROWID", (1, 2, 3)),
        ("CREATE TABLE t (a, b, c)", (1, 2, "x" * 5000)),
        ("CREATE TABLE t (a, b, c)", (1, "x" * 100, 3)),
        ("CREATE TABLE t (a, b, c)", (1, 2, 0.5)),
    ],
)
def test_declines(tmp_path: Path, ddl: str, row: tuple) -> None:
    root = table(tmp_path / "t.sqlite", [row], ddl=ddl)
    with pytest.raises(pages.UnsupportedError):
        pages.read_columns(tmp_path / "t.sqlite", root, [0, 2])


def test_added_column_is_declined(tmp_path: Path) -> None:
    root = table(tmp_path / "t.sqlite", [(1, 2, 3)])
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as db:
        db.execute("ALTER TABLE t ADD COLUMN d DEFAULT 9")
        db.commit()
    with pytest.raises(pages.UnsupportedError):
        pages.read_columns(tmp_path / "t.sqlite", root, [3])


@pytest.mark.parametrize("of", ["leaf", "interior page"])
def test_a_page_without_cells_below_the_root_is_declined(tmp_path: Path, of: str) -> None:
    """A link that was changed to another table's page, or a count that was lost: SQLite calls it malformed as well."""
    file = tmp_path / "t.sqlite"
    root = table(file, [(i, i, i) for i in range(2000)])
    data = bytearray(file.read_bytes())
    interior = (root - 1) * 512
    assert data[interior] == 5
    child = int.from_bytes(data[interior + 8 : interior + 12], "big")
    page = interior if of == "interior page" else (child - 1) * 512
    data[page + 3 : page + 5] = b"\0\0"
    file.write_bytes(data)
    with pytest.raises(pages.UnsupportedError):
        pages.read_columns(file, root, [0])
    with closing(sqlite3.connect(file)) as db, pytest.raises(sqlite3.DatabaseError, match="malformed"):
        db.execute("SELECT sum(a) FROM t").fetchone()


def test_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    file = tmp_path / "t.sqlite"
    root = table(file, [(i, i, i) for i in range(2000)])
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(400):
        data = bytearray(whole)
        for at in rng.integers(512, len(data), 20):
            data[at] = rng.integers(256)
        file.write_bytes(data[: rng.integers(len(data) // 2, len(data) + 1)])
        try:
            columns = pages.read_columns(file, root, [0, 1, 2])
        except pages.UnsupportedError:
            continue
        assert len({len(column) for column in columns}) == 1
