"""Apply, verify and revert ``patches/`` on an installed Ray or a source tree."""

from repro.ray_patches.install import (
    PatchStatus,
    Status,
    apply,
    digests,
    find_ray,
    overlay,
    ray_version,
    revert,
    status,
    verify,
)
from repro.ray_patches.series import Patch, load_series

__all__ = [
    "Patch",
    "PatchStatus",
    "Status",
    "apply",
    "digests",
    "find_ray",
    "load_series",
    "overlay",
    "ray_version",
    "revert",
    "status",
    "verify",
]
