"""nsys-ai's ``gpu_idle_gaps`` on a copy of a profile, kept verbatim.

The skill gets a plain ``sqlite3`` connection: the command line of nsys-ai would first let DuckDB try to download an
extension, 10 s without a network. It runs in a process of its own, because it keeps every kernel as Python objects
(about 1 GB a million) and takes its time: there both can be limited.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import TypeAdapter

from repro.analysis.model import NsysAi
from repro.nsysdb.reader import complete_database
from repro.text import one_line

AGREEMENT_MS: Final = 0.01
TIMEOUT_S: Final = 120.0
_MEMORY_SHARE = 0.8  # of what is available
_MEMORY_FLOOR_BYTES = 4 << 30  # address space that its libraries reserve, used or not, and some more
_QUOTED: Final = 300
_ROWS: Final = TypeAdapter(list[dict[str, Any]])
_CHILD = Path(__file__).with_name("nsys_ai_child.py")


def gpu_idle_gaps(path: Path, device_id: int, *, timeout_s: float = TIMEOUT_S) -> NsysAi:
    """Run the skill with its defaults (as ``nsys-ai skill run gpu_idle_gaps FILE -p device=N``) on a copy of ``path``.

    Never raises for a failure of nsys-ai: ``error`` says what happened. ``InputError`` if ``path`` is unreadable.
    """
    try:
        version = metadata.version("nsys-ai")
    except metadata.PackageNotFoundError:
        return NsysAi(version=None, rows=None, error="nsys-ai is not installed")
    try:
        rows = _ask(path, device_id, timeout_s)
    except _NoAnswerError as error:
        return NsysAi(version=version, rows=None, error=str(error))
    except OSError as error:  # no room for the copy, no memory for the process
        return NsysAi(version=version, rows=None, error=f"nsys-ai could not be run: {one_line(str(error))}")
    summary: dict[str, Any] = next((row for row in reversed(rows) if row.get("_summary")), {})
    return NsysAi(
        version=version,
        rows=rows,
        device_idle_ms=_number(summary.get("device_idle_ms")),
        copy_ms=_number(summary.get("copy_ms")),
    )


class _NoAnswerError(Exception):
    """nsys-ai was run and gave nothing; the message says what happened."""


def _ask(path: Path, device_id: int, timeout_s: float) -> list[dict[str, Any]]:
    """The rows that nsys-ai answers, or ``_NoAnswerError``; ``OSError`` if it could not be run."""
    with tempfile.TemporaryDirectory(prefix="repro-nsys-ai-") as folder:
        copy, answer = Path(folder) / "profile.sqlite", Path(folder) / "answer.json"
        with complete_database(path) as complete:
            shutil.copyfile(complete, copy)
        limit = max(int(psutil.virtual_memory().available * _MEMORY_SHARE), _MEMORY_FLOOR_BYTES)
        try:
            done = subprocess.run(
                [sys.executable, str(_CHILD), str(copy), str(device_id), str(answer), str(limit)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise _NoAnswerError(f"nsys-ai gave no answer in {timeout_s:.0f} s") from None
        if done.returncode != 0:
            lines = done.stderr.decode("utf-8", "replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
            raise _NoAnswerError(f"nsys-ai ended with status {done.returncode}: {one_line(said, _QUOTED)}")
        try:
            rows = _ROWS.validate_python(json.loads(answer.read_bytes()))
            json.dumps(rows, allow_nan=False)  # Python reads NaN and Infinity, which are no JSON
        except (OSError, ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
            said = one_line(str(error).strip(), _QUOTED)
            raise _NoAnswerError(f"nsys-ai gave no list of JSON objects: {said}") from None
        return rows


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
