"""Results on disk: the layout of ``results/<run>/``, versioned JSON, files that appear only when whole."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from repro.errors import InputError
from repro.spec import RunSpec

RUN_SCHEMA = "repro.run/1"

_M = TypeVar("_M", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class DeviceRecord(_Model):
    """The one device of a run."""

    kind: str
    name: str
    model_file: str | None = None
    model_sha256: str | None = None
    driver: str | None = None


class PayloadRecord(_Model):
    """What a batch is accounted at and what of it travelled through Ray."""

    nominal_bytes: int
    travelled_bytes: int
    travelled_rows: int
    reason: str


class ChecksumRecord(_Model):
    """Sum over what came out of D2H, beside the expected one."""

    expected: str
    got: str
    ok: bool


class StagingRecord(_Model):
    """Host side of pinned staging: copying that moved instead of vanishing shows up here."""

    host_copy_ms: float
    pinned_bytes: int
    slots: int
    fallback: str | None = None


class CaptureRecord(_Model):
    """One capture of one profile. ``skipped`` holds the reason where there is none."""

    profile: str
    repeat: int
    file: str | None = None
    sha256: str | None = None
    started_utc: str | None = None
    wall_s: float | None = None
    """The GPU stage's, from its first batch in to its last batch out, profiler on, warm-up excluded."""
    warmup_batches: int | None = None
    warmup_s: float | None = None
    batches: int | None = None
    batch_wait_ms: float | None = None
    """Mean time the GPU stage waited for its next batch."""
    producer_bound: bool | None = None
    prep_ms: float | None = None
    """Mean CPU time of preparation a batch, measured in the window."""
    source_interval_ms: float | None = None
    """Time between two batches of a source that is paced; 0 of one that is as fast as it can be."""
    checksum: ChecksumRecord | None = None
    staging: StagingRecord | None = None
    node: str | None = None
    nsys_rep: str | None = None
    skipped: str | None = None
    error: str | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class RunRecord(_Model):
    """``run.json``: everything about a run that its profiles do not say themselves."""

    schema_: str = Field(RUN_SCHEMA, alias="schema")
    run: str
    created_utc: str
    kit_version: str
    revision: str | None
    versions: dict[str, str]
    machine: dict[str, Any]
    spec: RunSpec
    device: DeviceRecord
    payload: PayloadRecord | None = None
    patches: list[dict[str, Any]] = Field(default_factory=list)
    captures: list[CaptureRecord] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class RunDir:
    """Paths of one run. Making the object touches nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_json = root / "run.json"
        self.profiles = root / "profiles"
        self.analysis = root / "analysis"
        self.figures = root / "figures"
        self.logs = root / "logs"
        self.report = root / "report.md"

    @staticmethod
    def stem(profile: str, repeat: int) -> str:
        """``inline`` for the first repeat, ``inline.2`` for the second."""
        return profile if repeat == 1 else f"{profile}.{repeat}"

    def profile_path(self, profile: str, repeat: int = 1) -> Path:
        return self.profiles / f"{self.stem(profile, repeat)}.sqlite"

    def analysis_path(self, profile: str, repeat: int = 1) -> Path:
        return self.analysis / f"{self.stem(profile, repeat)}.json"

    def read(self) -> RunRecord:
        """The run's record; ``InputError`` if there is none or another kit version wrote it."""
        return read_json(self.run_json, RunRecord, RUN_SCHEMA)

    def write(self, record: RunRecord) -> None:
        write_json(self.run_json, record)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes ``path`` only if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, model: BaseModel) -> None:
    write_text(path, json.dumps(model.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, model: type[_M], schema: str) -> _M:
    """Read a versioned artifact.

    ``InputError`` if it is missing, not JSON, without a schema, or of another schema version (both are named).
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist.", remedy="Name a finished run, or make one: make reproduce."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema:
        raise InputError(
            f"{path} has schema {found!r}, this kit reads {schema!r}.", remedy="Capture again with this kit."
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
