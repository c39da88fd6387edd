"""The strict unified-diff applier, against difflib's output, hand-written diffs and patch(1)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import InputError
from repro.ray_patches import unified

TEXTS = st.lists(st.sampled_from([b"a", b"b", b"", b"\xff\r", b"- x", b"\\ y", b"\x0c"]), max_size=30).flatmap(
    lambda lines: st.sampled_from([b"\n".join(lines), b"".join(line + b"\n" for line in lines)])
)


@given(old=TEXTS, new=TEXTS, context=st.integers(0, 3))
def test_a_diff_goes_forward_and_back(old: bytes, new: bytes, context: int) -> None:
    files = unified.parse(unified.diff("dir/file", old, new, context=context))
    if old == new:
        assert files == []
        return
    (file,) = files
    assert (file.old_path, file.path) == ("dir/file", "dir/file")
    assert file.apply(old) == new
    assert file.reverse(new) == old


@given(new=TEXTS.filter(bool))
def test_a_new_file(new: bytes) -> None:
    (file,) = unified.parse(unified.diff("new", None, new))
    assert file.old_path is None
    assert file.apply(b"") == new
    assert file.reverse(new) == b""


@pytest.mark.skipif(not shutil.which("patch"), reason="no patch(1) on PATH")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"1\n2\n3\n", b"1\nx\n3"),
        (b"1\n2", b"1\n2\n3\n"),
        (None, b"1\n2"),
        (b"1\n" * 50, b"0\n" + b"1\n" * 50),
    ],
)
def test_patch_reads_what_we_write(tmp_path: Path, old: bytes | None, new: bytes) -> None:
    if old is not None:
        (tmp_path / "file").write_bytes(old)
    diff = unified.diff("file", old, new)
    done = subprocess.run(["patch", "-p1", "-F0"], input=diff, cwd=tmp_path, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "file").read_bytes() == new


def test_context_must_match_at_the_very_line() -> None:
    (file,) = unified.parse(unified.diff("file", b"1\n2\n3\n", b"1\n2x\n3\n"))
    with pytest.raises(InputError, match="hunk 1 of 1 does not fit at line 1"):
        file.apply(b"0\n1\n2\n3\n")
    with pytest.raises(InputError, match="does not fit"):
        file.apply(b"1\n2\n3 \n")


@pytest.mark.parametrize(
    ("diff", "problem"),
    [
        (b"hello\n", "not the start of a file"),
        (b"--- a/f\n", "not the start of a file"),
        (b"--- a/f\n+++ b/f\n", "has no hunk"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "deletes"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n", "1 old and 0 new lines"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n x\n?y\n", "does not belong to a hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n+z\n", "not the start of a file"),
        (b"--- a/f\n+++ b/f\n@@ one @@\n", "not a hunk header"),
    ],
)
def test_malformed_diffs_are_refused(diff: bytes, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        unified.parse(diff)
