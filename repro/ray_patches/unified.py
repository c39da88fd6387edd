"""Unified diffs on bytes: make one, parse one, apply it forwards or backwards.

Strict on purpose: a hunk applies at the line its header names and nowhere else, and every context line must match.
Patches are only ever applied to files whose digest is known, so an offset or fuzz could only hide a mistake.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from repro.errors import InputError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")
_NO_NEWLINE = b"\\ No newline at end of file\n"


@dataclass(frozen=True)
class Hunk:
    """Lines (with their line ends) of both sides; ``old_start`` and ``new_start`` are 0-based line numbers."""

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """Changes of one file. ``old_path`` is None for a file that the diff creates; deletions are not supported."""

    old_path: str | None
    path: str
    hunks: tuple[Hunk, ...]

    def apply(self, content: bytes) -> bytes:
        """``content`` with the hunks applied; ``InputError`` names the first hunk that does not fit."""
        return self._replace(content, [(hunk.old_start, hunk.old, hunk.new) for hunk in self.hunks])

    def reverse(self, content: bytes) -> bytes:
        """The content that ``apply`` made ``content`` from; ``InputError`` as for ``apply``."""
        return self._replace(content, [(hunk.new_start, hunk.new, hunk.old) for hunk in self.hunks])

    def _replace(self, content: bytes, steps: list[tuple[int, tuple[bytes, ...], tuple[bytes, ...]]]) -> bytes:
        lines = _lines(content)
        result: list[bytes] = []
        at = 0
        for number, (start, expected, replacement) in enumerate(steps, 1):
            end = start + len(expected)
            if start < at or tuple(lines[start:end]) != expected:
                raise InputError(f"{self.path}: hunk {number} of {len(steps)} does not fit at line {start + 1}.")
            result += [*lines[at:start], *replacement]
            at = end
        return b"".join([*result, *lines[at:]])


def parse(diff: bytes) -> list[FileDiff]:
    """Files of a unified diff, in order. Paths are returned without their ``a/`` and ``b/``.

    ``InputError`` on anything that is not a complete unified diff: text between files, a hunk shorter or longer than
    its header says, a deletion.
    """
    lines = _lines(diff)
    files: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if not (lines[at].startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")):
            raise InputError(f"Diff line {at + 1} is not the start of a file: {lines[at]!r}.")
        old_path, path = _path(lines[at], b"a/"), _path(lines[at + 1], b"b/")
        if path is None:
            raise InputError(f"The diff deletes {old_path}; patches may change and add files only.")
        at += 2
        hunks = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise InputError(f"The diff of {path} has no hunk.")
        files.append(FileDiff(old_path, path, tuple(hunks)))
    return files


def diff(path: str, old: bytes | None, new: bytes, *, context: int = 3) -> bytes:
    """Unified diff of one file without time stamps; ``old`` is None for a new file."""
    made = difflib.diff_bytes(
        difflib.unified_diff,
        _lines(old or b""),
        _lines(new),
        b"/dev/null" if old is None else b"a/" + path.encode(),
        b"b/" + path.encode(),
        n=context,
        lineterm=b"\n",
    )
    return b"".join(line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE for line in made)


def _lines(content: bytes) -> list[bytes]:
    """Lines as a diff counts them: only ``\\n`` ends one (``splitlines`` would also split at ``\\r`` and ``\\f``)."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _path(line: bytes, prefix: bytes) -> str | None:
    name = line[4:].rstrip(b"\n").split(b"\t")[0]
    if name == b"/dev/null":
        return None
    return name.removeprefix(prefix).decode()


def _hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    match = _HUNK.fullmatch(lines[at])
    if not match:
        raise InputError(f"Diff line {at + 1} is not a hunk header: {lines[at]!r}.")
    old_line, old_count, new_line, new_count = (1 if group is None else int(group) for group in match.groups())
    header = at + 1
    at += 1
    old: list[bytes] = []
    new: list[bytes] = []
    sides: list[list[bytes]] = []
    while at < len(lines):
        kind, text = lines[at][:1], lines[at][1:]
        if lines[at] == _NO_NEWLINE:
            for side in sides:
                side[-1] = side[-1][:-1]
        elif len(old) == old_count and len(new) == new_count:
            break
        elif kind in (b" ", b"-", b"+"):
            sides = [side for side, kinds in ((old, b" -"), (new, b" +")) if kind in kinds]
            for side in sides:
                side.append(text)
        else:
            raise InputError(f"Diff line {at + 1} does not belong to a hunk: {lines[at]!r}.")
        at += 1
    if len(old) != old_count or len(new) != new_count:
        raise InputError(f"The hunk at diff line {header} has {len(old)} old and {len(new)} new lines, not as it says.")
    # An empty side names the line before it, so its 1-based number is already the 0-based start.
    return Hunk(old_line - bool(old), tuple(old), new_line - bool(new), tuple(new)), at
