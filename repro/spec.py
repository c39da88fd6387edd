"""The seven published profiles and the specification of a run: the one place that knows them.

Published values are those of the dataset card "Ray Data GPU Idle Profiles (B200)" (Apache-2.0).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Mode = Literal["inline", "split", "pinned", "overlap", "staged"]
Regime = Literal["single-operator", "producer-bound", "compute-bound"]
Profiler = Literal["emulated", "nsys", "torch"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Published(_Frozen):
    """What the card says of one profile; ``None`` is a dash in its table."""

    device_idle_pct: float
    copy_ms: float | None
    note: str


class ProfileSpec(_Frozen):
    """One profile of the run.

    ``mode`` selects the GPU stage, ``regime`` how it is fed, ``needs_patch`` the patch of ``patches/``
    without which it cannot be captured. ``published`` is ``None`` for profiles the kit adds of its own.
    """

    name: str
    stage: str
    mode: Mode
    regime: Regime = "single-operator"
    needs_patch: str | None = None
    published: Published | None = None


class RunSpec(_Frozen):
    """Everything that decides what a run captures. Same spec, same workload.

    ``rows`` x ``cols`` float32 is one batch, one block and one task; ``matmuls`` kernels run on it;
    ``prep_ms`` is CPU time of preparation a batch. ``payload`` is what travels through Ray on the emulated device:
    ``full`` the nominal batch, a number that many rows of it, ``auto`` as many as this machine's cores can feed.
    """

    profiles: tuple[str, ...]
    device: Literal["emulated", "cuda"]
    device_model: str = "b200"
    profiler: Profiler = "emulated"
    repeats: int = Field(1, ge=1, le=100)
    blocks: int = Field(32, ge=1, le=100_000)
    rows: int = Field(2048, ge=1)
    cols: int = Field(8192, ge=1)
    matmuls: int = Field(9, ge=1, le=10_000)
    prep_ms: float = Field(40.0, ge=0, le=60_000)
    payload: Literal["auto", "full"] | int = "auto"
    stock_ray: bool = False

    @field_validator("profiles")
    @classmethod
    def _known_profiles(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in PROFILES]
        if unknown or not names:
            raise ValueError(f"unknown profile {', '.join(unknown) or '(none)'}; known: {', '.join(PROFILES)}")
        return names

    @field_validator("payload")
    @classmethod
    def _positive_rows(cls, payload: str | int) -> str | int:
        if isinstance(payload, int) and payload < 1:
            raise ValueError("payload must be auto, full or a number of rows of at least 1")
        return payload

    @property
    def batch_bytes(self) -> int:
        """Nominal bytes of one float32 batch (64 MiB with the card's 2048 x 8192)."""
        return self.rows * self.cols * 4


def _profile(
    name: str,
    stage: str,
    mode: Mode,
    idle_pct: float,
    copy_ms: float | None,
    note: str,
    *,
    regime: Regime = "single-operator",
    needs_patch: str | None = None,
) -> ProfileSpec:
    published = Published(device_idle_pct=idle_pct, copy_ms=copy_ms, note=note)
    return ProfileSpec(name=name, stage=stage, mode=mode, regime=regime, needs_patch=needs_patch, published=published)


PROFILES: dict[str, ProfileSpec] = {
    profile.name: profile
    for profile in (
        _profile("inline", "prep inside the GPU UDF", "inline", 59.0, None, "serial load→compute"),
        _profile("split", "prep as a CPU operator", "split", 29.1, None, "H2D 8.5 GB/s pageable"),
        _profile("pinned", "naive `pin_memory` in the UDF", "pinned", 31.4, None, "worse: staging still serial"),
        _profile(
            "overlap",
            "`enable_true_multi_threading` + a stream per thread",
            "overlap",
            24.7,
            None,
            "31.3% of H2D overlapped",
        ),
        _profile(
            "patched_split",
            "clean profile after fixing the Ray nsight bug",
            "split",
            31.3,
            339.6,
            "idle split by copy vs wait",
        ),
        _profile(
            "final_split",
            "baseline for the prototype",
            "split",
            62.4,
            830.3,
            "before pinned staging",
            regime="producer-bound",
        ),
        _profile(
            "final_staged",
            "after the map_batches pinned-staging prototype",
            "staged",
            54.8,
            155.1,
            "copy_ms −82%",
            regime="producer-bound",
            needs_patch="pinned-staging",
        ),
        ProfileSpec(
            name="compute_split",
            stage="final_split fed by a second CPU operator",
            mode="split",
            regime="compute-bound",
        ),
        ProfileSpec(
            name="compute_staged",
            stage="final_staged fed by a second CPU operator",
            mode="staged",
            regime="compute-bound",
            needs_patch="pinned-staging",
        ),
    )
}
"""The published table, in its order, then the kit's own: the final pair where compute is the bottleneck."""

PUBLISHED: tuple[str, ...] = tuple(name for name, profile in PROFILES.items() if profile.published)
"""Names of the seven published profiles: what a run captures unless told otherwise."""
