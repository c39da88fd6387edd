"""Read the GPU activity of an Nsight Systems SQLite export into numpy arrays.

Exports differ by version and by who post-processed them: tables carry suffixes, columns move or are missing, rows are
unsorted, times are NULL, text is not UTF-8. Tables are therefore resolved by prefix and columns by name; rows without
a usable time are left out and counted. Only the columns an idle analysis needs are read. The file is opened read-only
and never changed, and nothing is created beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import stat
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import numpy as np

from repro.errors import InputError
from repro.nsysdb import pages, schema
from repro.nsysdb.pages import NULL
from repro.text import one_line

_MAGIC = b"SQLite format 3\x00"
_MARKERS = ("STRINGIDS", "META_DATA_", "EXPORT_META_DATA", "TARGET_INFO_", "ANALYSIS_DETAILS", "CUPTI_ACTIVITY_KIND_")
_SIDE_SUFFIXES = ("-wal", "-journal")
_MAX_DIAGNOSTICS = 5
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter where SQLite's message quotes damaged text
_LIMIT_NS = 1 << 62  # 146 years either side of zero: the difference of two times is still an int64


@dataclass(frozen=True)
class Rows:
    """Rows of one activity table, in file order; parallel int64 arrays of shape (n,). Times are nanoseconds."""

    start: np.ndarray
    end: np.ndarray
    device: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further columns by the name asked for; ``NULL`` where the file has NULL or lacks the column."""

    def __len__(self) -> int:
        return len(self.start)

    def where(self, mask: np.ndarray) -> Rows:
        """The rows where ``mask`` is true; these very arrays if that is all of them."""
        if mask.all():
            return self
        return Rows(
            self.start[mask], self.end[mask], self.device[mask], {name: a[mask] for name, a in self.columns.items()}
        )

    def of_device(self, device_id: int) -> Rows:
        return self.where(self.device == device_id)


@dataclass(frozen=True)
class Profile:
    """What an idle analysis needs of an export, all devices together."""

    kernels: Rows
    graphs: Rows
    """CUDA graph launches traced as a whole: their kernels are in no kernel table."""
    memcpys: Rows
    """``columns``: bytes, copyKind, srcKind, dstKind."""
    has_memcpy_table: bool
    device_names: dict[int, str]
    emulated: bool
    dropped: dict[str, int]
    """Rows left out, by reason, over all devices."""
    diagnostics: list[str]
    """What the profiler itself warned of, most severe first, at most five."""
    notes: list[str]

    @cached_property
    def devices(self) -> dict[int, int]:
        """Device id -> number of kernels and graph launches on it, in order of the ids."""
        counts = Counter(_count(self.kernels.device))
        counts.update(_count(self.graphs.device))
        return dict(sorted(counts.items()))


@contextmanager
def complete_database(path: Path) -> Iterator[Path]:
    """A path whose bytes alone are the database: ``path`` itself, or a temporary copy with its WAL or journal applied.

    ``InputError`` if ``path`` is no readable SQLite file.
    """
    check_file(path)
    beside = _beside(path)
    if not beside:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="repro-profile-") as folder:
        copy = Path(folder) / "profile.sqlite"
        shutil.copyfile(path, copy)
        for other in beside:
            shutil.copyfile(other, f"{copy}{other.name[other.name.rindex('-') :]}")
        try:
            with closing(sqlite3.connect(copy)) as db:
                mode = db.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
                db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except _UNREADABLE as error:
            raise InputError(f"{path} with its {beside[0].name} cannot be read: {error}.") from None
        if mode != "delete":
            raise InputError(f"{path}: the write-ahead log beside it could not be applied to a copy.")
        yield copy


def read_profile(path: Path) -> Profile:
    """Read the export at ``path``.

    ``InputError`` if it is missing, truncated, damaged, no SQLite file, or no Nsight Systems export. A profile without
    GPU activity is returned as such: what to make of it is the caller's to say.
    """
    with complete_database(path) as file:
        try:
            with closing(connect(file)) as db:
                return _Reader(path, file, db).read()
        except _UNREADABLE as error:
            raise InputError(
                f"{path} cannot be read as SQLite: {_clean(str(error))}.", remedy="Export it again: nsys export."
            ) from None


def connect(path: Path) -> sqlite3.Connection:
    """Open a complete database without locks or side files; text that is not UTF-8 is read with replacements."""
    db = sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1", uri=True)
    db.text_factory = _text
    return db


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _count(ids: np.ndarray) -> dict[int, int]:
    """Distinct values and how often each occurs."""
    if not len(ids):
        return {}
    low = int(ids.min())
    if int(ids.max()) - low < 1 << 16:  # what device ids are: counting beats sorting
        counts = np.bincount(ids - low)
        return {low + int(i): int(counts[i]) for i in np.flatnonzero(counts)}
    values, counts = np.unique(ids, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def check_file(path: Path) -> None:
    """``InputError`` if ``path`` is not a whole SQLite file by its header; reads no more than that."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a file.")
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    if not header.startswith(_MAGIC) or len(header) < 100:
        raise InputError(
            f"{path} is {'empty' if not header else 'not a SQLite database'}.",
            remedy="Export the report first: nsys export --type sqlite REPORT.nsys-rep.",
        )
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    # The page count is only valid when the file's change counter says so; a WAL or journal may hold the rest.
    claimed = int.from_bytes(header[28:32], "big") * page_size
    if header[24:28] == header[92:96] and status.st_size < claimed and not _beside(path):
        raise InputError(
            f"{path} is truncated: {status.st_size} bytes of {claimed}.", remedy="Copy or export it again."
        )


def _beside(path: Path) -> list[Path]:
    """Side files that hold part of the database: a write-ahead log, the journal of an interrupted transaction.

    SQLite keeps them beside the file itself, not beside a link to it.
    """
    names = [path.resolve().with_name(f"{path.resolve().name}{suffix}") for suffix in _SIDE_SUFFIXES]
    return [name for name in names if name.is_file() and name.stat().st_size > 0]


def _clean(text: str, limit: int = 200) -> str:
    """Text of a profile on one line without control characters."""
    line = "".join(" " if unicodedata.category(char).startswith("C") else char for char in text)
    return one_line(" ".join(line.split()), limit)


class _Reader:
    """One pass over one export."""

    def __init__(self, path: Path, file: Path, db: sqlite3.Connection) -> None:
        self.path = path  # as the user named it, for messages
        self.file = file  # what is read: the same, or a complete copy
        self.db = db
        self.dropped: Counter[str] = Counter()
        self.notes: list[str] = []
        self.roots = {
            name: root or 0
            for name, root in db.execute("SELECT name, rootpage FROM sqlite_master WHERE type IN ('table', 'view')")
        }

    def read(self) -> Profile:
        if not any(name.upper().startswith(_MARKERS) for name in self.roots):
            raise InputError(
                f"{self.path} is a SQLite database, but not an Nsight Systems export.",
                remedy="Name a file that nsys export --type sqlite wrote.",
            )
        if self.file != self.path:
            self.notes.append("A write-ahead log or journal lies beside the file; a copy with it applied was read.")
        kernels = self._activity(schema.KERNEL, "kernel")
        graphs = self._activity(schema.GRAPH, "graph")
        memcpys = self._activity(schema.MEMCPY, "memcpy", ("bytes", "copyKind", "srcKind", "dstKind"))
        names = self._device_names()
        kinds = self._pairs(schema.CAPTURE_METADATA, "name", "value")
        emulated = kinds.get(schema.DEVICE_KIND_KEY) == "emulated" or any(
            "emulated" in n.lower() for n in names.values()
        )
        return Profile(
            kernels=kernels,
            graphs=graphs,
            memcpys=memcpys,
            has_memcpy_table=self.table(schema.MEMCPY) is not None,
            device_names=names,
            emulated=emulated,
            dropped=dict(sorted(self.dropped.items())),
            diagnostics=self._diagnostics(),
            notes=self.notes,
        )

    def table(self, canonical: str) -> str | None:
        """The table of this file that stands for ``canonical``.

        The exact name first, then the highest ``_V<n>``, then another suffix, in any case. A digit right after the
        name is another activity kind (MEMCPY2 is peer-to-peer), not a version. A table without rows gives way to
        one with rows.
        """
        found: list[tuple[int, int, str]] = []
        for name in self.roots:
            if not name.upper().startswith(canonical.upper()):
                continue
            rest = name[len(canonical) :]
            if not rest:
                found.append((0, 0, name))
            elif version := re.fullmatch(r"_?[vV](\d+)", rest):
                found.append((1, -int(version[1]), name))
            elif not rest[0].isdigit():
                found.append((2, 0, name))
        found.sort()
        for _, _, name in found:
            if self.db.execute(f"SELECT 1 FROM {_quoted(name)} LIMIT 1").fetchone():
                return name
        return found[0][2] if found else None

    def columns(self, table: str) -> dict[str, str]:
        """Lower-case name -> name as declared."""
        return {row[1].lower(): row[1] for row in self.db.execute(f"PRAGMA table_xinfo({_quoted(table)})")}

    def _activity(self, canonical: str, kind: str, further: tuple[str, ...] = ()) -> Rows:
        """Rows of an activity table with usable times; none if the file has no such table."""
        table = self.table(canonical)
        if table is None:
            nothing = np.empty(0, np.int64)
            return Rows(nothing, nothing, nothing, dict.fromkeys(further, nothing))
        if table != canonical:
            self.notes.append(f"{kind} rows are read from table {_clean(table)}.")
        known = self.columns(table)
        missing = [name for name in ("start", "end", "deviceId") if name.lower() not in known]
        if missing:
            raise InputError(f"{self.path}: table {_clean(table)} has no column {', '.join(missing)}.")
        present = [name for name in ("start", "end", "deviceId", *further) if name.lower() in known]
        arrays = dict(zip(present, self._read(table, [known[name.lower()] for name in present]), strict=True))
        start, end, device = (arrays.pop(name) for name in ("start", "end", "deviceId"))
        absent = {name: np.full(len(start), NULL, np.int64) for name in further if name not in arrays}
        return self._usable(Rows(start, end, device, arrays | absent), kind)

    def _usable(self, rows: Rows, kind: str) -> Rows:
        # NULL is the smallest integer: below the limit as a start, before any start as an end.
        usable = (rows.end > rows.start) & (rows.start > -_LIMIT_NS) & (rows.end < _LIMIT_NS) & (rows.device != NULL)
        if usable.all():
            return rows
        null = (rows.start == NULL) | (rows.end == NULL)
        no_device = ~null & (rows.device == NULL)
        beyond = (np.minimum(rows.start, rows.end) <= -_LIMIT_NS) | (np.maximum(rows.start, rows.end) >= _LIMIT_NS)
        beyond &= ~null & ~no_device
        timed = ~null & ~no_device & ~beyond
        zero = timed & (rows.end == rows.start)
        negative = timed & (rows.end < rows.start)
        for reason, mask in (
            ("start or end is no integer", null),
            ("no device", no_device),
            ("time out of range", beyond),
            ("zero duration", zero),
            ("negative duration", negative),
        ):
            if count := int(np.count_nonzero(mask)):
                self.dropped[f"{kind}: {reason}"] += count
        return rows.where(usable)

    def _read(self, table: str, columns: list[str]) -> list[np.ndarray]:
        """Integer columns of a table as int64 arrays, ``NULL`` for anything that is no integer."""
        info = list(self.db.execute(f"PRAGMA table_xinfo({_quoted(table)})"))
        position = {row[1]: row[0] for row in info}
        plain = not any(row[6] for row in info) and not any(row[5] for row in info if row[1] in columns)
        if plain and self.roots[table]:
            try:
                return pages.read_columns(self.file, self.roots[table], [position[name] for name in columns])
            except pages.UnsupportedError:
                pass  # SQLite reads it, or says what is wrong with it
        # A float that holds a whole number counts as one: some exports went through tools that write floats.
        values = ", ".join(
            f"CASE typeof({c}) WHEN 'integer' THEN {c} WHEN 'real' THEN iif({c} = CAST({c} AS INTEGER), "
            f"CAST({c} AS INTEGER), {NULL + 1} - 1) ELSE {NULL + 1} - 1 END"
            for c in map(_quoted, columns)
        )
        cursor = self.db.execute(f"SELECT {values} FROM {_quoted(table)}")
        flat = np.fromiter(chain.from_iterable(cursor), np.int64)
        return list(np.ascontiguousarray(flat.reshape(-1, len(columns)).T))

    def _pairs(self, canonical: str, key: str, value: str) -> dict[str, str]:
        table = self.table(canonical)
        if table is None or not {key, value} <= self.columns(table).keys():
            return {}
        return {str(k): str(v) for k, v in self.db.execute(f"SELECT {key}, {value} FROM {_quoted(table)}")}

    def _device_names(self) -> dict[int, str]:
        """CUDA device id -> name. The ids of the two target tables differ where devices were hidden or reordered."""
        gpus = self.table("TARGET_INFO_GPU")
        if gpus is None or not {"id", "name"} <= self.columns(gpus).keys():
            return {}
        cuda = "cuDevice" if "cudevice" in self.columns(gpus) else "NULL"
        by_gpu: dict[int, str] = {}
        names: dict[int, str] = {}
        for gpu, device, name in self.db.execute(f"SELECT id, {cuda}, name FROM {_quoted(gpus)}"):
            if isinstance(gpu, int) and name:
                by_gpu[gpu] = _clean(str(name))
                names[device if isinstance(device, int) else gpu] = by_gpu[gpu]
        devices = self.table("TARGET_INFO_CUDA_DEVICE")
        if devices is not None and {"gpuid", "cudaid"} <= self.columns(devices).keys():
            seen: dict[int, set[int]] = {}
            for gpu, device in self.db.execute(f"SELECT gpuId, cudaId FROM {_quoted(devices)}"):
                if isinstance(gpu, int) and isinstance(device, int):
                    seen.setdefault(device, set()).add(gpu)
            for device, found in sorted(seen.items()):
                if len(found) > 1:
                    self.notes.append(
                        f"Device {device} is another GPU in different processes (GPUs {sorted(found)}): their work is "
                        "analysed as if it ran on one."
                    )
                elif (gpu := next(iter(found))) in by_gpu:
                    names[device] = by_gpu[gpu]
        return names

    def _diagnostics(self) -> list[str]:
        table = self.table("DIAGNOSTIC_EVENT")
        if table is None or not {"text", "severity"} <= self.columns(table).keys():
            return []
        rows = self.db.execute(
            f"SELECT DISTINCT severity, text FROM {_quoted(table)} WHERE severity >= 2 AND text IS NOT NULL"
        )
        ordered = sorted(rows, key=lambda row: -row[0] if isinstance(row[0], int) else 0)
        return [_clean(str(text)) for _, text in ordered[:_MAX_DIAGNOSTICS]]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
