"""Exports as found in the wild: each oddity read right, or refused with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from synthetic import graph, kernel, kernels_only, memcpy, write

from repro.analysis import Analysis, analyze
from repro.errors import InputError, NoGpuActivityError
from repro.nsysdb import pages, schema
from repro.text import one_line

KERNELS = [kernel(1000, 2000), kernel(4000, 5000)]
COPIES = [memcpy(2500, 3500)]


def ours(path: Path, device_id: int | None = None) -> Analysis:
    """Analyse, and check that the folder is left as it was, byte for byte."""
    before = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in path.parent.iterdir()}
    try:
        return analyze(path, device_id, with_nsys_ai=False)
    finally:
        after = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in path.parent.iterdir()}
        assert after == before


def times(got: Analysis) -> tuple[int, int, int, int]:
    return got.span_ns, got.busy_ns, got.copy_ns, got.wait_ns


PLAIN = (4000, 2000, 1000, 1000)
HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("kernels", "memcpys"),
    [
        (schema.KERNEL, schema.MEMCPY),
        (f"{schema.KERNEL}_V2", f"{schema.MEMCPY}_V3"),
        (schema.KERNEL.lower(), f"{schema.MEMCPY}_2027"),
    ],
)
def test_tables_by_prefix(tmp_path: Path, kernels: str, memcpys: str) -> None:
    got = ours(write(tmp_path / "p.sqlite", {kernels: KERNELS, memcpys: COPIES}))
    assert times(got) == PLAIN
    assert any(kernels in note for note in got.notes) == (kernels != schema.KERNEL)


def test_the_newest_version_wins_and_an_empty_table_gives_way(tmp_path: Path) -> None:
    tables = {schema.KERNEL: [], f"{schema.KERNEL}_V2": [kernel(0, 9)], f"{schema.KERNEL}_V10": KERNELS}
    assert times(ours(write(tmp_path / "p.sqlite", tables))) == (4000, 2000, 0, 2000)


def test_memcpy2_is_another_activity(tmp_path: Path) -> None:
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY2": COPIES}))
    assert times(got) == (4000, 2000, 0, 2000)
    assert any("no memcpy table" in note for note in got.notes)


def test_columns_by_name(tmp_path: Path) -> None:
    turned = [dict(reversed(list(row.items()))) for row in KERNELS]
    shouted = [{key.upper(): value for key, value in row.items()} for row in COPIES]
    assert times(ours(write(tmp_path / "p.sqlite", {schema.KERNEL: turned, schema.MEMCPY: shouted}))) == PLAIN


def test_missing_column_is_named(tmp_path: Path) -> None:
    rows = [{"start": 1, "end": 2}]
    with pytest.raises(InputError, match="no column deviceId"):
        ours(write(tmp_path / "p.sqlite", {schema.KERNEL: rows}))


def test_memcpy_without_kinds(tmp_path: Path) -> None:
    bare = [{"start": 2500, "end": 3500, "deviceId": 0, "copyKind": 1}]
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, schema.MEMCPY: bare}))
    assert times(got) == PLAIN
    assert got.h2d.gb_per_s is None
    assert "size" in got.absent["h2d.gb_per_s"]
    assert got.h2d.pageable_pct is None
    assert "h2d.pageable_pct" in got.absent


def test_unsorted_overlapping_and_nested_rows(tmp_path: Path) -> None:
    got = ours(
        kernels_only(tmp_path / "p.sqlite", (4000, 5000), (1000, 3000), (1500, 1600), (2900, 3100), (4000, 4001))
    )
    assert times(got) == (4000, 3100, 0, 900)
    assert got.kernels == 5


def test_rows_without_a_usable_time_are_counted(tmp_path: Path) -> None:
    odd = [
        kernel(0, 0),
        kernel(3000, 3000),
        kernel(4500, 4000),
        kernel(None, 99_000),
        kernel(50_000, None),
        kernel(10, 20, None),
        kernel(0.5, 20_000),
        kernel("soon", 20_000),
    ]
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS + odd, schema.MEMCPY: COPIES}))
    assert times(got) == PLAIN
    assert got.dropped == {
        "kernel: negative duration": 1,
        "kernel: no device": 1,
        "kernel: start or end is no integer": 4,
        "kernel: zero duration": 2,
    }


@pytest.mark.parametrize(
    ("start", "end"),
    [(-HUGE, -HUGE + 9), (HUGE - 9, HUGE), (-HUGE, HUGE), (-(2**62), 9), (9, 2**62)],
)
def test_times_whose_difference_is_no_integer_of_64_bits(tmp_path: Path, start: int, end: int) -> None:
    rows = {schema.KERNEL: [*KERNELS, kernel(start, end)], schema.MEMCPY: [*COPIES, memcpy(start, end)]}
    got = ours(write(tmp_path / "p.sqlite", rows))
    assert times(got) == PLAIN
    assert got.dropped == {"kernel: time out of range": 1, "memcpy: time out of range": 1}


def test_sums_beyond_64_bits(tmp_path: Path) -> None:
    copies = [memcpy(-(2**61), 2**61, size=HUGE), memcpy(-(2**61), 2**61, size=HUGE)]
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, schema.MEMCPY: copies}))
    assert (got.h2d.bytes, got.h2d.ms) == (2 * HUGE, 2**63 / 1e6)
    assert got.h2d.gb_per_s == pytest.approx(2)
    assert times(got) == (4000, 2000, 2000, 0)


@pytest.mark.parametrize("size", [None, -5, "many", 0.5])
def test_copies_without_a_size(tmp_path: Path, size: object) -> None:
    copies = [*COPIES, memcpy(2500, 3500, size=size), memcpy(5000, 6000, kind=2, src=2, dst=1)]
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, schema.MEMCPY: copies}))
    assert (got.h2d.bytes, got.h2d.gb_per_s, got.h2d.pageable_gb_per_s) == (None, None, None)
    assert got.absent["h2d.bytes"] == got.absent["h2d.gb_per_s"] == "some copies do not say their size"
    assert (got.h2d.count, got.d2h.bytes, got.d2h.gb_per_s) == (2, 1000, 1)


@pytest.mark.parametrize("without", ["copyKind", "copykind of one"])
def test_copies_without_a_direction(tmp_path: Path, without: str) -> None:
    copies = [memcpy(2500, 3500, kind=None)]
    if without == "copyKind":
        del copies[0]["copyKind"]
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, schema.MEMCPY: copies}))
    assert times(got) == PLAIN
    assert got.h2d.count == 0
    assert any(note.startswith("1 copies do not say their direction") for note in got.notes)


def test_whole_floats_are_times(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE TABLE {schema.KERNEL} (start REAL, end REAL, deviceId REAL)")
        db.executemany(f"INSERT INTO {schema.KERNEL} VALUES (?, ?, 0)", [(1000.0, 2000.0), (4000.0, 5000.0)])
        db.commit()
    assert times(ours(path)) == (4000, 2000, 0, 2000)


def test_a_kernel_that_starts_at_zero_counts(tmp_path: Path) -> None:
    assert times(ours(kernels_only(tmp_path / "p.sqlite", (0, 10), (20, 30)))) == (30, 20, 0, 10)


def test_devices_and_processes_are_kept_apart(tmp_path: Path) -> None:
    rows = [*KERNELS, kernel(1500, 2500, globalPid=9 << 24), kernel(0, 9000, 1)]
    path = write(tmp_path / "p.sqlite", {schema.KERNEL: rows, schema.MEMCPY: [*COPIES, memcpy(0, 9000, 1)]})
    assert times(ours(path)) == (4000, 2500, 1000, 500)  # of two processes on device 0: their union
    assert times(ours(path, 1)) == (9000, 9000, 0, 0)
    assert ours(path).devices_with_kernels == [0, 1]


def test_device_choice(tmp_path: Path) -> None:
    only = write(tmp_path / "only.sqlite", {schema.KERNEL: [kernel(0, 5, 3), kernel(7, 9, 3)]})
    assert ours(only).device_id == 3
    with pytest.raises(NoGpuActivityError, match=r"no kernels on device 0\. .*: 3 \(2\)"):
        ours(only, 0)
    several = write(tmp_path / "several.sqlite", {schema.KERNEL: [kernel(0, 5, 3), kernel(7, 9, 5)]})
    with pytest.raises(NoGpuActivityError, match=r"3 \(1\), 5 \(1\)"):
        ours(several)
    many = write(tmp_path / "many.sqlite", {schema.KERNEL: [kernel(0, 5, device) for device in range(1, 1001)]})
    with pytest.raises(NoGpuActivityError, match=r"15 \(1\), 16 \(1\) and 984 more\.$"):
        ours(many)


def test_graph_launches_are_busy_and_said(tmp_path: Path) -> None:
    got = ours(
        write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, schema.GRAPH: [graph(2000, 3000), graph(6000, 7000)]})
    )
    assert times(got) == (6000, 4000, 0, 2000)
    assert got.graphs == 2
    assert "2 CUDA graph launches" in got.notes[0]
    assert "idle 0.002 ms (50.00%)" in got.notes[0]
    alone = ours(write(tmp_path / "alone.sqlite", {schema.GRAPH: [graph(0, 10), graph(20, 30)]}))
    assert times(alone) == (30, 20, 0, 10)


def test_no_kernels_quotes_the_profiler(tmp_path: Path) -> None:
    said = [
        {"timestamp": 0, "severity": 1, "text": "Profiling has started."},
        {"timestamp": 0, "severity": 2, "text": "Driver 13.2 is not\n\x1b[31msupported."},
        {"timestamp": 0, "severity": 3, "text": None},
    ]
    path = write(tmp_path / "p.sqlite", {schema.KERNEL: [], "DIAGNOSTIC_EVENT": said})
    with pytest.raises(NoGpuActivityError, match=r"Driver 13\.2 is not \[31msupported") as caught:
        ours(path)
    assert "Profiling has started" not in str(caught.value)
    assert "None" not in str(caught.value)
    assert caught.value.exit_status == 4
    dead = write(tmp_path / "dead.sqlite", {schema.KERNEL: [kernel(0, 0)]})
    with pytest.raises(NoGpuActivityError, match="zero duration: 1"):
        ours(dead)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS, "TARGET_INFO_GPU": [{"id": 0, "name": "x"}]})
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE TARGET_INFO_GPU SET name = CAST(x'4770ff55' AS TEXT)")
        db.execute("UPDATE StringIds SET value = CAST(x'ff' AS TEXT)")
        db.commit()
    assert ours(path).device_name == "Gp\ufffdU"
    beside = analyze(path).nsys_ai
    assert beside is not None
    assert beside.error is None


def test_hidden_devices_are_named_by_their_gpu(tmp_path: Path) -> None:
    gpus = [{"id": 0, "name": "first", "cuDevice": None}, {"id": 1, "name": "second", "cuDevice": None}]
    tables = {schema.KERNEL: KERNELS, "TARGET_INFO_GPU": gpus}
    one = write(tmp_path / "one.sqlite", tables | {"TARGET_INFO_CUDA_DEVICE": [{"gpuId": 1, "cudaId": 0, "pid": 1}]})
    assert ours(one).device_name == "second"
    both = [{"gpuId": gpu, "cudaId": 0, "pid": gpu} for gpu in (0, 1)]
    two = write(tmp_path / "two.sqlite", tables | {"TARGET_INFO_CUDA_DEVICE": both})
    assert any("another GPU in different processes" in note for note in ours(two).notes)


def test_write_ahead_log_is_honoured(tmp_path: Path) -> None:
    source = kernels_only(tmp_path / "source.sqlite", (1000, 2000))
    folder = tmp_path / "copy"
    folder.mkdir()
    with closing(sqlite3.connect(source)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute(
            f"INSERT INTO {schema.KERNEL} SELECT 4000, 5000, deviceId, 1, 7, 2, globalPid, 1, 1 FROM {schema.KERNEL}"
        )
        db.commit()
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", folder / f"p.sqlite{suffix}")
    got = ours(folder / "p.sqlite")
    assert times(got) == (4000, 2000, 0, 2000)
    assert any("write-ahead log" in note for note in got.notes)
    link = tmp_path / "link" / "of.sqlite"  # SQLite keeps the log beside the file, not beside the link
    link.parent.mkdir()
    link.symlink_to(folder / "p.sqlite")
    assert times(ours(link)) == (4000, 2000, 0, 2000)
    (folder / "p.sqlite-wal").unlink()  # a WAL database closed without its log is still a database
    assert times(ours(folder / "p.sqlite")) == (1000, 1000, 0, 0)


def test_journal_of_an_interrupted_transaction_is_honoured(tmp_path: Path) -> None:
    source = kernels_only(tmp_path / "source.sqlite", *((i * 10, i * 10 + 5) for i in range(2000)))
    folder = tmp_path / "copy"
    folder.mkdir()
    with closing(sqlite3.connect(source, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size=5")  # pages of the transaction reach the file before it ends
        db.execute("BEGIN")
        db.execute(f"UPDATE {schema.KERNEL} SET end = end + 3")
        for suffix in ("", "-journal"):
            shutil.copyfile(f"{source}{suffix}", folder / f"p.sqlite{suffix}")
    assert times(ours(folder / "p.sqlite")) == (19_995, 10_000, 0, 9_995)


@pytest.mark.parametrize("name", ["\udcff.sqlite", "é |`.sqlite", "a\nb.sqlite"])
def test_names_that_are_no_text(tmp_path: Path, name: str) -> None:
    got = ours(write(tmp_path / "p.sqlite", {schema.KERNEL: KERNELS}).rename(tmp_path / name))
    assert got.file == one_line(name)
    assert json.loads(got.model_dump_json())["file"] == got.file


def test_read_only_folder_and_odd_names(tmp_path: Path) -> None:
    folder = tmp_path / "read #only? 100%"
    folder.mkdir()
    path = write(folder / "p.sqlite", {schema.KERNEL: KERNELS, schema.MEMCPY: COPIES})
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert times(ours(path)) == PLAIN
        assert analyze(path).nsys_ai.error is None  # type: ignore[union-attr]
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"NSYS-REP" * 50, "not a SQLite database"), (b"SQLite format 3\x00", "not a SQLite database")],
)
def test_files_that_are_no_database(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        ours(path)


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    path = kernels_only(tmp_path / "p.sqlite", *((i * 10, i * 10 + 5) for i in range(5000)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="truncated"):
        ours(path)
    path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))
    with pytest.raises(InputError, match="cannot be read"):
        ours(path)
    path.write_bytes(whole.replace(b"StringIds", b"\xff\xfe\x1bingIds").replace(b"CREATE TABLE", b"CREATE TAB\xff\xff"))
    with pytest.raises(InputError, match="cannot be read"):  # SQLite quotes the damaged name
        ours(path)


def test_other_inputs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        ours(tmp_path / "none.sqlite")
    with pytest.raises(InputError, match="is not a file"):
        analyze(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="is not a file"):
            analyze(endless)
    (tmp_path / "pipe").unlink()
    foreign = tmp_path / "foreign.sqlite"
    with closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(InputError, match="not an Nsight Systems export"):
        ours(foreign)


def test_a_view_instead_of_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "p.sqlite", {"hidden": KERNELS})
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE VIEW {schema.KERNEL} AS SELECT * FROM hidden")
        db.commit()
    assert times(ours(path)) == (4000, 2000, 0, 2000)


TABLE = f"CREATE TABLE {schema.KERNEL} (start INTEGER, end INTEGER, deviceId INTEGER)"
FILL = f"INSERT INTO {schema.KERNEL} (start, end, deviceId) VALUES (1000, 2000, 3), (4000, 5000, 3)"


@pytest.mark.parametrize(
    "statements",
    [
        [f"CREATE TABLE {schema.KERNEL} (start INTEGER PRIMARY KEY, end INTEGER, deviceId INTEGER)", FILL],
        [f"CREATE TABLE {schema.KERNEL} (start PRIMARY KEY, end, deviceId) WITHOUT ROWID", FILL],
        [f"CREATE TABLE {schema.KERNEL} (g AS (start) VIRTUAL, start, end, deviceId)", FILL],
        [
            f"CREATE TABLE {schema.KERNEL} (start, ms, deviceId, end AS (start + ms * 1000) STORED)",
            f"INSERT INTO {schema.KERNEL} VALUES (1000, 1, 3), (4000, 1, 3)",
        ],
        [
            f"CREATE TABLE {schema.KERNEL} (start INTEGER, end INTEGER)",
            f"INSERT INTO {schema.KERNEL} VALUES (1000, 2000)",
            f"ALTER TABLE {schema.KERNEL} ADD COLUMN deviceId INTEGER DEFAULT 3",
            f"INSERT INTO {schema.KERNEL} VALUES (4000, 5000, 3)",
        ],
        [
            f"CREATE TABLE {schema.KERNEL} (name TEXT, start, end, deviceId)",
            FILL,
            f"UPDATE {schema.KERNEL} SET name = hex(zeroblob(9000))",
        ],
        [TABLE.replace("deviceId INTEGER", f"deviceId, {', '.join(f'c{i}' for i in range(140))}"), FILL],
        ["PRAGMA encoding='UTF-16be'", TABLE, FILL, f"ALTER TABLE {schema.KERNEL} RENAME COLUMN end TO End"],
        ["PRAGMA page_size=65536", TABLE, FILL],
        ["PRAGMA auto_vacuum=1", TABLE, FILL],
        [TABLE, "CREATE TABLE t (x)", "INSERT INTO t VALUES (zeroblob(99999))", FILL, "DELETE FROM t", "DROP TABLE t"],
    ],
    ids=lambda statements: next(text for text in statements if text.startswith(("PRAGMA", "CREATE")))[:60],
)
def test_every_layout_of_a_table_is_the_same_to_both_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: list[str]
) -> None:
    with closing(sqlite3.connect(tmp_path / "p.sqlite")) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
    first = ours(tmp_path / "p.sqlite")
    assert (first.device_id, times(first)) == (3, (4000, 2000, 0, 2000))

    def decline(*arguments: object) -> None:
        raise pages.UnsupportedError("on purpose")

    monkeypatch.setattr(pages, "read_columns", decline)
    assert ours(tmp_path / "p.sqlite") == first
