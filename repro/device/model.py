"""Time models of GPUs: TOML files whose every value names its source.

``load_model("b200")`` loads one that comes with the kit, ``load_model("path/to/file.toml")`` one's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from repro.errors import InputError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MODELS = Path(__file__).parent / "models"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Quantity(_Frozen):
    """A positive value, in the unit that its key names, and where it comes from."""

    value: float = Field(gt=0)
    source: str = Field(min_length=1)
    assumption: bool = False
    """True if no published figure of this very machine gives the value."""


class Count(_Frozen):
    """A positive whole number and where it comes from."""

    value: int = Field(gt=0)
    source: str = Field(min_length=1)
    assumption: bool = False


class DeviceModel(_Frozen):
    """What the emulated device takes for each kind of work. GB are 1e9 bytes.

    Picklable and comparable; two devices of equal models behave the same.
    """

    schema_: Literal["repro.device-model/1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    matmul_total_ms: Quantity
    matmul_count: Count
    matmul_rows: Count
    matmul_cols: Count
    pageable_h2d_gb_per_s: Quantity
    pageable_d2h_gb_per_s: Quantity
    pinned_h2d_gb_per_s: Quantity
    pinned_d2h_gb_per_s: Quantity
    host_copy_gb_per_s: Quantity
    pin_gb_per_s: Quantity
    pin_latency_us: Quantity
    launch_overhead_us: Quantity
    sm_count: Count
    memory_gb: Quantity

    def matmul_ns(self, rows: float, cols: int) -> int:
        """Time of one product [rows x cols] x [cols x cols], from the reference work's rate (at least 1 ns)."""
        reference = self.matmul_count.value * self.matmul_rows.value * self.matmul_cols.value**2
        return max(1, round(self.matmul_total_ms.value * 1e6 * rows * cols**2 / reference))

    def copy_ns(self, size_bytes: int, *, to_device: bool, pinned: bool) -> int:
        """Time of a copy between host and device (at least 1 ns)."""
        if to_device:
            rate = self.pinned_h2d_gb_per_s if pinned else self.pageable_h2d_gb_per_s
        else:
            rate = self.pinned_d2h_gb_per_s if pinned else self.pageable_d2h_gb_per_s
        return transfer_ns(size_bytes, rate.value)

    def pin_ns(self, size_bytes: int) -> int:
        """Time the caller is blocked for pinning ``size_bytes``."""
        return round(self.pin_latency_us.value * 1e3) + transfer_ns(size_bytes, self.pin_gb_per_s.value)

    @property
    def launch_overhead_ns(self) -> int:
        return round(self.launch_overhead_us.value * 1e3)


def transfer_ns(size_bytes: int, gb_per_s: float) -> int:
    """Time to move ``size_bytes`` at ``gb_per_s`` (1e9 bytes a second); at least 1 ns."""
    return max(1, round(size_bytes / gb_per_s))


def model_path(name: str | Path) -> Path:
    """File of a model: one of the kit's by name, or a path ending in ``.toml``. ``UsageError`` if there is none."""
    known = {file.stem: file for file in sorted(_MODELS.glob("*.toml"))}
    path = Path(name) if str(name).endswith(".toml") else known.get(str(name))
    if path is None or not path.is_file():
        raise UsageError(
            f"no device model {str(name)!r}.", remedy=f"Known: {', '.join(known)}; or give the path of a .toml file."
        )
    return path


def load_model(name: str | Path) -> DeviceModel:
    """Read and check a model file. ``UsageError`` if there is none; ``InputError`` naming the file and the key."""
    path = model_path(name)
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"device model {path} cannot be read: {error}.") from None
    try:
        return DeviceModel.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"device model {path}: {key}: {first['msg']}.", remedy="repro/device/models/b200.toml shows every key."
        ) from None
