"""Synthetic Nsight exports for tests: any schema version and any damage, built with plain SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from repro.nsysdb import schema

PID = 4242


def activity(start: Any, end: Any, device: Any = 0, stream: int = 7, correlation: int = 1) -> dict[str, Any]:
    return {
        "start": start,
        "end": end,
        "deviceId": device,
        "contextId": 1,
        "streamId": stream,
        "correlationId": correlation,
        "globalPid": 1 << 48 | PID << 24,
    }


def kernel(start: Any, end: Any, device: Any = 0, **more: Any) -> dict[str, Any]:
    return activity(start, end, device) | {"demangledName": 1, "shortName": 1} | more


def memcpy(
    start: Any, end: Any, device: Any = 0, *, kind: Any = 1, size: Any = 1000, src: Any = 0, dst: Any = 2
) -> dict:
    return activity(start, end, device) | {"bytes": size, "copyKind": kind, "srcKind": src, "dstKind": dst}


def graph(start: int, end: int, device: int = 0) -> dict[str, Any]:
    return activity(start, end, device) | {"graphId": 1, "graphExecId": 1}


def write(path: Path, tables: dict[str, Iterable[dict[str, Any]]], *, page_size: int = 4096) -> Path:
    """Write rows by table name. Columns are those the rows name, untyped constraints aside: no NOT NULL."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous=OFF")
        db.execute(f"PRAGMA page_size={page_size}")
        db.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("INSERT INTO StringIds VALUES (1, 'gemm')")
        for name, rows in tables.items():
            rows = list(rows)
            columns = list(rows[0]) if rows else ["start", "end", "deviceId"]
            declared = ", ".join(f'"{column}" {_type(column)}' for column in columns)
            db.execute(f'CREATE TABLE "{name}" ({declared})')
            db.executemany(
                f'INSERT INTO "{name}" VALUES ({",".join("?" * len(columns))})',
                ([row[column] for column in columns] for row in rows),
            )
        db.commit()
    return path


def _type(column: str) -> str:
    return "TEXT" if column in ("text", "name", "value") else "INTEGER"


def kernels_only(path: Path, *spans: tuple[int, int]) -> Path:
    return write(path, {schema.KERNEL: [kernel(*span) for span in spans]})
