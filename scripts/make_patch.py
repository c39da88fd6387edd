#!/usr/bin/env python3
"""Write patches/NAME.patch from two ray packages: ``make_patch.py NAME STOCK_RAY CHANGED_RAY``.

The diff and the File fields are made from the two trees; the other header fields are kept from the existing
patches/NAME.patch, or start as a form to fill in. For a file that an earlier patch of the series touches too,
STOCK_RAY must have that patch applied.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repro.ray_patches import series, unified

FORM = """Description: WHAT IT CHANGES
 WHY
Bug: https://github.com/ray-project/ray/issues/NUMBER
Upstream: https://github.com/ray-project/ray/pull/NUMBER
Base: ray {version} {commit}
Tried: {version}: WHAT HAPPENED
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("stock", type=Path, help="ray package as it was")
    parser.add_argument("changed", type=Path, help="ray package with the change")
    parser.add_argument("--context", type=int, default=3, help="context lines (default 3)")
    arguments = parser.parse_args()
    path = series.PATCHES_DIR / f"{arguments.name}.patch"
    header = kept_header(path) if path.exists() else new_header(arguments.stock)
    fields, diffs = [], []
    for relative in changed_files(arguments.stock, arguments.changed):
        old_file = arguments.stock / relative
        old = old_file.read_bytes() if old_file.exists() else None
        new = (arguments.changed / relative).read_bytes()
        name = f"{series.ROOT}{relative}"
        fields.append(f"File: {name}\n before {series.digest(old)}\n after {series.digest(new)}\n")
        diffs.append(unified.diff(name, old, new, context=arguments.context))
    if not diffs:
        sys.exit("The two trees do not differ.")
    path.write_bytes((header + "".join(fields) + "\n").encode() + b"".join(diffs))
    for change in series.parse_patch(path).files:
        old_file = arguments.stock / change.path
        change.forward(old_file.read_bytes() if old_file.exists() else None)
        change.backward((arguments.changed / change.path).read_bytes())
        print(change.path)


def kept_header(path: Path) -> str:
    """Everything above the first File field."""
    return path.read_text(encoding="utf-8").partition("\n\n")[0].partition("\nFile: ")[0] + "\n"


def new_header(stock: Path) -> str:
    text = (stock / "_version.py").read_text(encoding="utf-8")
    values = {key: re.search(rf'^{key} = "(.+)"', text, re.M) for key in ("version", "commit")}
    return FORM.format(**{key: match[1] if match else "UNKNOWN" for key, match in values.items()})


def changed_files(stock: Path, changed: Path) -> list[str]:
    """Paths below the package that differ, sorted; byte-code and editor left-overs do not count."""
    paths = []
    for file in sorted(changed.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts or file.suffix in (".pyc", ".orig", ".rej", ".so"):
            continue
        relative = file.relative_to(changed)
        old = stock / relative
        if not old.is_file() or (not old.samefile(file) and old.read_bytes() != file.read_bytes()):
            paths.append(str(relative))
    return paths


if __name__ == "__main__":
    main()
