"""The files of ``patches/``: ``series`` names the patches in order, each is a header and a unified diff.

The header is a block of ``Field: value`` lines (continuation lines start with a space) and ends with an empty line:

    Description: what it changes
     and, on further lines, why
    Bug: URL of the upstream issue
    Upstream: URL of the upstream pull request, or why there is none
    Base: ray VERSION COMMIT
    Tried: VERSION: what happened there (one field a version)
    File: python/ray/PATH
     before SHA256 (or "absent" for a file that the patch adds)
     after SHA256

Paths are those of Ray's repository, so ``git apply`` takes the same file in a checkout. Digests are those of the whole
file, before and after this patch, with the patches that ``series`` names earlier already applied.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from repro.errors import InputError
from repro.ray_patches import unified

PATCHES_DIR = Path(__file__).resolve().parents[2] / "patches"
ABSENT = "absent"
"""Stands for the digest of a file that does not exist."""
ROOT = "python/ray/"
"""Where the ray package lies in Ray's repository."""

_DIGEST = "[0-9a-f]{64}"
_FILE = re.compile(rf"{ROOT}(?P<path>\S+)\s+before (?P<before>{_DIGEST}|{ABSENT})\s+after (?P<after>{_DIGEST})")
_BASE = re.compile(r"ray (?P<version>\S+) (?P<commit>[0-9a-f]{40})")


@dataclass(frozen=True)
class FileChange:
    """One file of a patch: its path in the ray package, digests of both sides, and the hunks between them."""

    path: str
    before: str
    after: str
    diff: unified.FileDiff = field(repr=False)

    def forward(self, content: bytes | None) -> bytes:
        return _checked(self.diff.apply(content or b""), self.after, self.path)

    def backward(self, content: bytes) -> bytes | None:
        restored = self.diff.reverse(content)
        return None if self.before == ABSENT and not restored else _checked(restored, self.before, self.path)


@dataclass(frozen=True)
class Patch:
    """One patch of the series. ``sha256`` is that of the patch file itself."""

    name: str
    sha256: str
    description: str
    bug: str
    upstream: str
    base_version: str
    base_commit: str
    tried: tuple[str, ...]
    files: tuple[FileChange, ...]


def digest(content: bytes | None) -> str:
    """SHA-256 of a file's content; ``ABSENT`` for a file that does not exist."""
    return ABSENT if content is None else hashlib.sha256(content).hexdigest()


def load_series(directory: Path = PATCHES_DIR) -> list[Patch]:
    """All patches in the order of ``series``.

    ``InputError`` if one is missing or malformed, if its file list is not that of its diff, if two patches have
    different bases, or if a file's digests do not continue where the patch before left it.
    """
    try:
        lines = (directory / "series").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{directory / 'series'} cannot be read: {error.strerror}.") from None
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    patches = [parse_patch(directory / name) for name in names]
    left_at: dict[str, str] = {}
    for patch in patches:
        if patch.base_version != patches[0].base_version:
            raise InputError(
                f"{patch.name} is for Ray {patch.base_version}, {patches[0].name} for {patches[0].base_version}."
            )
        for change in patch.files:
            if left_at.setdefault(change.path, change.before) != change.before:
                raise InputError(f"{patch.name}: {change.path} does not start where the patch before it ended.")
            left_at[change.path] = change.after
    return patches


def parse_patch(path: Path) -> Patch:
    """Read one patch file; ``InputError`` as for ``load_series``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    header, _, body = content.partition(b"\n\n")
    try:
        fields = Parser().parsestr(header.decode(), headersonly=True)
        diffs = {file.path: file for file in unified.parse(body)}
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    files = []
    for value in fields.get_all("File", []):
        match = _FILE.fullmatch(value)
        if not match or ROOT + match["path"] not in diffs:
            raise InputError(f"{path}: File field without digests or without a diff: {value.splitlines()[0]}.")
        file = diffs.pop(ROOT + match["path"])
        if (file.old_path is None) != (match["before"] == ABSENT):
            raise InputError(f"{path}: {file.path} is added by the diff or by its File field, but not by both.")
        files.append(FileChange(match["path"], match["before"], match["after"], file))
    base = _BASE.fullmatch(fields.get("Base", ""))
    missing = [name for name in ("Description", "Bug", "Upstream", "Tried") if not fields.get(name)]
    if not base or missing or diffs or not files:
        problem = f"no field {', '.join(missing)}" if missing else f"no File field for {', '.join(diffs) or 'any file'}"
        raise InputError(f"{path}: {problem if base else 'Base is not: ray VERSION COMMIT'}.")
    return Patch(
        name=path.name.removesuffix(".patch"),
        sha256=digest(content),
        description=fields["Description"],
        bug=fields["Bug"],
        upstream=fields["Upstream"],
        base_version=base["version"],
        base_commit=base["commit"],
        tried=tuple(fields.get_all("Tried", [])),
        files=tuple(files),
    )


def _checked(content: bytes, expected: str, path: str) -> bytes:
    if digest(content) != expected:
        raise InputError(f"{path}: the result does not have the digest that the patch's header names.")
    return content
