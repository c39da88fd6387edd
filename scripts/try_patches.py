#!/usr/bin/env python3
"""What each patch does on other versions of Ray: ``try_patches.py RAY_PACKAGE...``.

Copies the files that the series touches, applies the patches one after the other with patch(1), and prints one line a
patch: applies (same or other base), with offset, with fuzz, or which hunks fail. Nothing is installed or changed; a
version that a patch applies to is not thereby one that it works on.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repro import ray_patches
from repro.errors import KitError
from repro.ray_patches import series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ray", type=Path, nargs="+", help="ray package, or the folder that holds it")
    arguments = parser.parse_args()
    try:
        patches = ray_patches.load_series()
        for given in arguments.ray:
            ray_dir = ray_patches.find_ray(given)
            for patch, outcome in tried(ray_dir, patches):
                print(f"{ray_patches.ray_version(ray_dir)}  {patch.name}: {outcome}")
    except KitError as error:
        sys.exit(str(error))


def tried(ray_dir: Path, patches: list[ray_patches.Patch]) -> list[tuple[ray_patches.Patch, str]]:
    """Each patch with its outcome, applied on top of those before it (as far as those applied)."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / series.ROOT
        for change in (change for patch in patches for change in patch.files):
            if (ray_dir / change.path).exists():
                (root / change.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ray_dir / change.path, root / change.path)
        for patch in patches:
            others = [change.path for change in patch.files if digest(root / change.path) != change.before]
            done = subprocess.run(
                ["patch", "-p1", "--batch", "--forward", "-i", str(series.PATCHES_DIR / f"{patch.name}.patch")],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=60,
            )
            outcomes.append((patch, outcome(done.stdout, done.returncode, others)))
    return outcomes


def digest(path: Path) -> str:
    return series.digest(path.read_bytes() if path.exists() else None)


def outcome(output: str, status: int, others: list[str]) -> str:
    if status:
        rejected = re.findall(
            r"^(\d+ out of \d+) hunks? \w+ -- saving rejects to file (\S+)\.rej", output, re.MULTILINE
        )
        listed = "; ".join(f"{count} hunks fail in {path.removeprefix(series.ROOT)}" for count, path in rejected)
        return f"does not apply: {listed or output.strip()}"
    if not others:
        return "applies; every file it touches is that of the base version"
    how = "with fuzz" if "with fuzz" in output else "at other lines" if "offset" in output else "at the same lines"
    return f"applies {how}; differs from the base version: {', '.join(others)}"


if __name__ == "__main__":
    main()
