"""Apply, verify, revert and overlay on a small stand-in for an installed Ray."""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from repro import ray_patches
from repro.errors import InputError, KitError, MachineError, UsageError, WaitTimeoutError
from repro.ray_patches import install, series, unified

STOCK = {
    "_version.py": 'commit = "0"\nversion = "2.58.0"\n',
    "__init__.py": "raise AssertionError('the stand-in must never be imported')\n",
    "core.py": "\n".join(f"line_{number}" for number in range(40)) + "\n",
    "data/plan.py": "def plan():\n    return 'stock'\n",
    "data/other.py": "other = 1\n",
}
CORE_1 = STOCK["core.py"].replace("line_3\n", "line_three\n")
CORE_2 = CORE_1.replace("line_30\n", "line_thirty\nline_more\n")
PLAN_1 = "def plan():\n    return 'first'\n"
FIRST = {"core.py": (STOCK["core.py"], CORE_1), "data/plan.py": (STOCK["data/plan.py"], PLAN_1)}
SECOND = {"core.py": (CORE_1, CORE_2), "data/new/added.py": (None, "added = True\n")}

Contents = dict[str, bytes]


def patch_text(changes: dict[str, tuple[str | None, str]], base: str = "2.58.0") -> bytes:
    header = f"Description: what\n why\nBug: url\nUpstream: url\nBase: ray {base} {'0' * 40}\nTried: 2.58.0: applies\n"
    diffs = b""
    for path, (old, new) in changes.items():
        before, after = (None if text is None else text.encode() for text in (old, new))
        assert after is not None
        header += f"File: python/ray/{path}\n before {series.digest(before)}\n after {series.digest(after)}\n"
        diffs += unified.diff(f"python/ray/{path}", before, after)
    return header.encode() + b"\n" + diffs


@pytest.fixture
def ray_dir(tmp_path: Path) -> Path:
    root = tmp_path / "site-packages" / "ray"
    for path, text in STOCK.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "series").write_text("# order matters\nfirst.patch\n\nsecond.patch  # on first\n")
    (folder / "first.patch").write_bytes(patch_text(FIRST))
    (folder / "second.patch").write_bytes(patch_text(SECOND))
    return folder


def contents(root: Path) -> Contents:
    files = (file for file in root.rglob("*") if file.is_file() and file.suffix != ".pyc")
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def list_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_dir())


def states(ray_dir: Path, patches: Path) -> dict[str, str]:
    return {one.patch.name: one.state for one in ray_patches.status(ray_dir, patches_dir=patches).patches}


def test_apply_and_revert_restore_byte_for_byte(ray_dir: Path, patches: Path) -> None:
    (ray_dir / "core.py").chmod(0o640)
    before, folders = contents(ray_dir), list_folders(ray_dir)
    assert states(ray_dir, patches) == {"first": "not applied", "second": "not applied"}

    ray_patches.apply(ray_dir, patches_dir=patches)
    assert states(ray_dir, patches) == {"first": "applied", "second": "applied"}
    assert (ray_dir / "core.py").read_text() == CORE_2
    assert (ray_dir / "core.py").stat().st_mode & 0o7777 == 0o640
    assert (ray_dir / "data/new/added.py").read_text() == "added = True\n"

    once = contents(ray_dir)
    ray_patches.apply(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == once

    ray_patches.revert(ray_dir, patches_dir=patches)
    assert (contents(ray_dir), list_folders(ray_dir)) == (before, folders)
    assert (ray_dir / "core.py").stat().st_mode & 0o7777 == 0o640


def test_named_patches_keep_the_order_of_a_shared_file(ray_dir: Path, patches: Path) -> None:
    before = contents(ray_dir)
    with pytest.raises(UsageError, match=re.escape("second without first: both change core.py")):
        ray_patches.apply(ray_dir, ["second"], patches_dir=patches)
    assert contents(ray_dir) == before
    ray_patches.apply(ray_dir, ["first"], patches_dir=patches)
    assert (ray_dir / "core.py").read_text() == CORE_1
    ray_patches.apply(ray_dir, ["second"], patches_dir=patches)
    with pytest.raises(UsageError, match="first without second"):
        ray_patches.revert(ray_dir, ["first"], patches_dir=patches)
    ray_patches.revert(ray_dir, ["second"], patches_dir=patches)
    assert states(ray_dir, patches) == {"first": "applied", "second": "not applied"}
    with pytest.raises(UsageError, match="Unknown patch third; known: first, second"):
        ray_patches.apply(ray_dir, ["third"], patches_dir=patches)
    with pytest.raises(UsageError, match="Unknown patch third"):
        ray_patches.verify(ray_dir, ["third"], patches_dir=patches)


@pytest.mark.parametrize("act", [ray_patches.status, ray_patches.apply, ray_patches.revert, ray_patches.verify])
def test_another_version_is_refused_by_both_names(ray_dir: Path, patches: Path, act: Callable[..., object]) -> None:
    (ray_dir / "_version.py").write_text('version = "2.60.0"\n')
    before = contents(ray_dir)
    with pytest.raises(MachineError, match=r"for Ray 2\.58\.0; .* is Ray 2\.60\.0"):
        act(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


@pytest.mark.parametrize("edit", ["text", "removed", "new file in the way"])
def test_foreign_edits_are_named_and_nothing_is_changed(ray_dir: Path, patches: Path, edit: str) -> None:
    if edit == "text":
        path = ray_dir / "data/plan.py"
        path.write_text("def plan():\n    return 'mine'\n")
    elif edit == "removed":
        path = ray_dir / "data/plan.py"
        path.unlink()
    else:
        path = ray_dir / "data/new/added.py"
        path.parent.mkdir()
        path.write_text("mine = True\n")
    before = contents(ray_dir)
    name = "second" if edit == "new file in the way" else "first"
    assert states(ray_dir, patches)[name] == "edited"
    for act in (ray_patches.apply, ray_patches.revert):
        with pytest.raises(MachineError, match=re.escape(str(path))) as caught:
            act(ray_dir, patches_dir=patches)
        assert "Nothing was changed" in caught.value.message
        assert ("Delete it" if name == "second" else "ray==2.58.0") in caught.value.remedy
    assert contents(ray_dir) == before
    with pytest.raises(MachineError, match=f"{name} is edited .*{path.name}: edited"):
        ray_patches.verify(ray_dir, patches_dir=patches)


def test_partly_applied_is_told_and_finished_or_taken_back(ray_dir: Path, patches: Path) -> None:
    before = contents(ray_dir)
    (ray_dir / "core.py").write_text(CORE_1)
    found = ray_patches.status(ray_dir, patches_dir=patches)
    assert found.patches[0].state == "partly applied"
    assert found.patches[0].files == {"core.py": "applied", "data/plan.py": "not applied"}
    assert "first is partly applied (core.py: applied, data/plan.py: not applied)" in found.problems()
    assert found.problems([]) == []
    ray_patches.apply(ray_dir, patches_dir=patches)
    assert states(ray_dir, patches) == {"first": "applied", "second": "applied"}
    (ray_dir / "core.py").write_text(CORE_1)
    ray_patches.revert(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


def test_a_diff_that_does_not_fit_changes_nothing(ray_dir: Path, patches: Path) -> None:
    wrong = patch_text(FIRST).replace(b"-    return 'stock'", b"-    return 'stuck'")
    (patches / "first.patch").write_bytes(wrong)
    before = contents(ray_dir)
    with pytest.raises(InputError, match=r"data/plan\.py: hunk 1 of 1 does not fit .* Nothing was changed"):
        ray_patches.apply(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


def test_a_result_of_another_digest_changes_nothing(ray_dir: Path, patches: Path) -> None:
    wrong = patch_text(FIRST).replace(b"+    return 'first'", b"+    return 'forst'")
    (patches / "first.patch").write_bytes(wrong)
    before = contents(ray_dir)
    with pytest.raises(InputError, match=r"data/plan\.py: the result does not have the digest"):
        ray_patches.apply(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["_stage", "_swap"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("act", [ray_patches.apply, ray_patches.revert])
def test_a_failure_at_any_write_is_rolled_back(
    ray_dir: Path,
    patches: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[..., object],
    at: int,
    step: str,
    error: BaseException,
) -> None:
    if act is ray_patches.revert:
        ray_patches.apply(ray_dir, patches_dir=patches)
        if step == "_stage" and at == 3:
            at = 2  # of the three files to revert one is removed, not written
    before, folders = contents(ray_dir), list_folders(ray_dir)
    done = getattr(install, step)
    calls = 0

    def failing(*arguments: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        done(*arguments, **options)

    monkeypatch.setattr(install, step, failing)
    with pytest.raises(MachineError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        act(ray_dir, patches_dir=patches)
    if isinstance(error, OSError):
        assert "No space left on device. Nothing was changed." in str(caught.value)
    assert (contents(ray_dir), list_folders(ray_dir)) == (before, folders)


def test_a_failing_roll_back_is_not_called_nothing_changed(
    ray_dir: Path, patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = install._swap

    def failing(path: Path, content: bytes | None) -> None:
        if path.name == "plan.py":
            raise OSError(5, "Input/output error", str(path))
        done(path, content)

    def no_restore(path: Path, content: bytes | None) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(install, "_swap", failing)
    monkeypatch.setattr(install, "_restore", no_restore)
    with pytest.raises(MachineError, match="Taking back what had been changed failed too"):
        ray_patches.apply(ray_dir, patches_dir=patches)
    assert states(ray_dir, patches)["first"] == "partly applied"


def test_what_a_crash_left_is_cleaned_up(ray_dir: Path, patches: Path) -> None:
    before = contents(ray_dir)
    (ray_dir / ".core.py.patching").write_text("half a fi")
    ray_patches.revert(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


@pytest.mark.parametrize("act", ["apply", "revert"])
@pytest.mark.parametrize("kill_at", [1, 2, 3])
def test_a_kill_between_two_files_is_recovered_from(ray_dir: Path, patches: Path, act: str, kill_at: int) -> None:
    before = contents(ray_dir)
    if act == "revert":
        ray_patches.apply(ray_dir, patches_dir=patches)
    code = f"""
import os
from pathlib import Path
from repro import ray_patches
from repro.ray_patches import install
swap, calls = install._swap, []
def kill_later(path, content):
    calls.append(path)
    if len(calls) == {kill_at}:
        os.kill(os.getpid(), 9)
    swap(path, content)
install._swap = kill_later
ray_patches.{act}(Path({str(ray_dir)!r}), patches_dir=Path({str(patches)!r}))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    if kill_at > 1:
        assert "partly applied" in states(ray_dir, patches).values()
    ray_patches.apply(ray_dir, patches_dir=patches)
    assert states(ray_dir, patches) == {"first": "applied", "second": "applied"}
    ray_patches.revert(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


@pytest.mark.skipif(sys.platform != "linux", reason="starts a process as another user")
def test_a_read_only_install_is_a_clear_error(tmp_path: Path, ray_dir: Path, patches: Path) -> None:
    # Not in pytest's own folder: another user may not pass through that.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
        ray_dir, patches = (Path(folder) / path.relative_to(tmp_path) for path in (ray_dir, patches))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(ray_dir)
        error = _apply_as_nobody(ray_dir, patches)
        assert "MachineError" in error
        assert "Permission denied. Nothing was changed. Run as the owner of this Python environment" in error
        assert contents(ray_dir) == before
        for path in (ray_dir, ray_dir / "data"):
            path.chmod(0o755)


def _apply_as_nobody(ray_dir: Path, patches: Path) -> str:
    # Everything is imported before the user changes: the interpreter may lie in a home of root's.
    code = f"""
import os
from pathlib import Path
from repro import ray_patches
where = dict(ray_dir=Path({str(ray_dir)!r}), patches_dir=Path({str(patches)!r}))
ray_patches.status(**where)
os.getuid() or (os.setgroups([]), os.setgid(65534), os.setuid(65534))
ray_patches.apply(**where)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stderr


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
def test_stale_byte_code_cannot_win(ray_dir: Path, patches: Path, mode: py_compile.PycInvalidationMode) -> None:
    def loaded() -> str:
        code = f"import sys; sys.path.insert(0, {str(ray_dir / 'data')!r}); import plan; print(plan.plan())"
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    plan = ray_dir / "data/plan.py"
    py_compile.compile(str(plan), invalidation_mode=mode)
    other = Path(py_compile.compile(str(ray_dir / "data/other.py")) or "")
    assert loaded() == "stock"
    ray_patches.apply(ray_dir, patches_dir=patches)
    assert loaded() == "first"  # of the same length as stock
    py_compile.compile(str(plan), invalidation_mode=mode)
    ray_patches.revert(ray_dir, patches_dir=patches)
    assert loaded() == "stock"
    assert other.exists()


def test_the_time_of_change_moves_even_within_a_second(ray_dir: Path, patches: Path) -> None:
    plan = ray_dir / "data/plan.py"
    now = int(time.time())
    for soon in range(-1, 3):  # one of them is the second in which apply writes
        os.utime(plan, (now + soon, now + soon))
        ray_patches.apply(ray_dir, patches_dir=patches)
        assert int(plan.stat().st_mtime) != now + soon
        ray_patches.revert(ray_dir, patches_dir=patches)


def test_verify_finds_byte_code_of_another_content(ray_dir: Path, patches: Path) -> None:
    ray_patches.apply(ray_dir, patches_dir=patches)
    assert ray_patches.verify(ray_dir, patches_dir=patches).problems() == []
    plan = ray_dir / "data/plan.py"
    stock = ray_dir / "stock.py"
    stock.write_text(STOCK["data/plan.py"])
    stale = plan.parent / "__pycache__" / f"plan.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(stock), str(stale), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    with pytest.raises(MachineError, match=r"plan\.py from byte-code of another content"):
        ray_patches.verify(ray_dir, patches_dir=patches)


def test_two_at_once_do_not_collide(ray_dir: Path, patches: Path) -> None:
    before = contents(ray_dir)
    failures: list[BaseException] = []

    def work(act: Callable[..., object]) -> None:
        try:
            for _ in range(15):
                act(ray_dir, patches_dir=patches)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(act,)) for act in (ray_patches.apply, ray_patches.revert) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    ray_patches.revert(ray_dir, patches_dir=patches)
    assert contents(ray_dir) == before


def test_waiting_for_another_process_is_bounded(ray_dir: Path, patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LOCK_LIMIT_S", 0.1)
    package = install._Package(ray_dir, ray_patches.load_series(patches))
    with package.locked(), pytest.raises(WaitTimeoutError, match="Another process has been changing"):
        ray_patches.apply(ray_dir, patches_dir=patches)


@pytest.mark.parametrize("installed", [[], ["first"], ["first", "second"]])
@pytest.mark.parametrize("wanted", [[], ["first"], ["first", "second"]])
def test_an_overlay_has_exactly_the_named_patches(
    ray_dir: Path, patches: Path, tmp_path: Path, installed: list[str], wanted: list[str]
) -> None:
    ray_patches.apply(ray_dir, installed, patches_dir=patches)
    (ray_dir / "binary").write_bytes(b"\0")
    (ray_dir / "binary").chmod(0o755)
    py_compile.compile(str(ray_dir / "data/plan.py"))
    other = Path(py_compile.compile(str(ray_dir / "data/other.py")) or "")
    before = contents(ray_dir)

    dest = ray_patches.overlay(tmp_path / "overlay", wanted, ray_dir=ray_dir, patches_dir=patches)

    assert dest == tmp_path / "overlay"
    found = states(dest, patches)
    assert [name for name, state in found.items() if state == "applied"] == wanted
    assert "edited" not in found.values() and "partly applied" not in found.values()
    assert (dest / "ray/binary").samefile(ray_dir / "binary")
    assert (dest / "ray" / other.relative_to(ray_dir)).exists()
    for path in ("core.py", "data/plan.py"):
        assert not (dest / "ray" / path).samefile(ray_dir / path)
    assert not list(dest.rglob("plan.*.pyc"))
    assert (dest / "ray/data/new/added.py").exists() == ("second" in wanted)
    ray_patches.revert(ray_dir, patches_dir=patches)
    ray_patches.apply(ray_dir, installed, patches_dir=patches)
    assert contents(ray_dir) == before
    assert states(dest, patches) == found


def test_overlays_that_cannot_be_made(ray_dir: Path, patches: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        ray_patches.overlay(tmp_path, [], ray_dir=ray_dir, patches_dir=patches)
    with pytest.raises(UsageError, match="second without first"):
        ray_patches.overlay(tmp_path / "o", ["second"], ray_dir=ray_dir, patches_dir=patches)
    (ray_dir / "core.py").write_text("mine")
    with pytest.raises(MachineError, match="has been edited"):
        ray_patches.overlay(tmp_path / "o", [], ray_dir=ray_dir, patches_dir=patches)
    assert not (tmp_path / "o").exists()


def test_what_an_older_series_left_goes_by_the_remedies(ray_dir: Path, patches: Path) -> None:
    """Reinstalling Ray gives its own files back, but leaves one that a patch had added."""
    (ray_dir / "core.py").write_text("older")
    (ray_dir / "data/new").mkdir()
    added = ray_dir / "data/new/added.py"
    added.write_text("older")
    with pytest.raises(MachineError) as reinstall:
        ray_patches.apply(ray_dir, patches_dir=patches)
    assert "pip install --force-reinstall" in str(reinstall.value)
    (ray_dir / "core.py").write_text(STOCK["core.py"])
    with pytest.raises(MachineError, match=r"added\.py has been edited") as delete:
        ray_patches.apply(ray_dir, patches_dir=patches)
    assert "Delete it" in str(delete.value)
    added.unlink()
    assert states(ray_dir, patches) == {"first": "not applied", "second": "not applied"}
    ray_patches.apply(ray_dir, patches_dir=patches)
    assert states(ray_dir, patches) == {"first": "applied", "second": "applied"}


def test_where_a_ray_is_looked_for(ray_dir: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "python").mkdir(parents=True)
    (checkout / "python" / "ray").symlink_to(ray_dir)
    for given in (ray_dir, ray_dir.parent, checkout):
        assert ray_patches.find_ray(given) == ray_dir
    with pytest.raises(MachineError, match="holds no ray package"):
        ray_patches.find_ray(tmp_path)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_files_that_are_links_into_a_shared_cache(
    ray_dir: Path, patches: Path, tmp_path: Path, link: Callable[..., None]
) -> None:
    """As uv installs with its link modes: the cache, which other environments share, stays as it is."""
    before = contents(ray_dir)
    package = tmp_path / "env" / "ray"
    shutil.copytree(ray_dir, package, copy_function=link)
    code = "from repro import ray_patches; from pathlib import Path; "
    code += f"ray_patches.apply(patches_dir=Path({str(patches)!r}))"
    env = {**os.environ, "PYTHONPATH": f"{package.parent}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert states(package, patches) == {"first": "applied", "second": "applied"}
    assert contents(ray_dir) == before
    ray_patches.revert(package, patches_dir=patches)
    assert contents(package) == before


def test_finding_the_installed_ray_does_not_import_it() -> None:
    code = "import sys; from repro import ray_patches; print(ray_patches.find_ray()); assert 'ray' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "ray"


def test_digests_for_the_run_record(ray_dir: Path, patches: Path) -> None:
    ray_patches.apply(ray_dir, ["first"], patches_dir=patches)
    assert ray_patches.digests(ray_dir, patches_dir=patches) == [
        {"name": "first", "sha256": series.digest((patches / "first.patch").read_bytes()), "state": "applied"},
        {"name": "second", "sha256": series.digest((patches / "second.patch").read_bytes()), "state": "not applied"},
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"Bug: url\n", b"", "no field Bug"),
        (b"Base: ray 2.58.0 ", b"Base: 2.58.0 ", "Base is not: ray VERSION COMMIT"),
        (b"File: python/ray/core.py", b"File: python/ray/cor.py", "without digests or without a diff"),
        (b"\n after ", b"\n later ", "without digests or without a diff"),
        (
            b"File: python/ray/data/plan.py",
            b"Fill: python/ray/data/plan.py",
            "no File field for python/ray/data/plan.py",
        ),
        (b"--- a/python/ray/core.py", b"--- /dev/null", "added by the diff or by its File field, but not by both"),
        (b"+++ b/", b"++ b/", "not the start of a file"),
    ],
)
def test_malformed_patches_are_named(patches: Path, old: bytes, new: bytes, problem: str) -> None:
    text = (patches / "first.patch").read_bytes()
    assert old in text
    (patches / "first.patch").write_bytes(text.replace(old, new))
    with pytest.raises(InputError, match=rf"first\.patch: .*{re.escape(problem)}"):
        ray_patches.load_series(patches)


def test_a_series_that_does_not_hang_together(patches: Path) -> None:
    (patches / "series").write_text("second.patch\nfirst.patch\n")
    with pytest.raises(InputError, match=r"first: core\.py does not start where the patch before it ended"):
        ray_patches.load_series(patches)
    (patches / "second.patch").write_bytes(patch_text({"x.py": (None, "x\n")}, base="2.60.0"))
    with pytest.raises(InputError, match=r"first is for Ray 2\.58\.0, second for 2\.60\.0"):
        ray_patches.load_series(patches)
    (patches / "series").write_text("third.patch\n")
    with pytest.raises(InputError, match=r"third\.patch cannot be read"):
        ray_patches.load_series(patches)
    (patches / "series").unlink()
    with pytest.raises(KitError, match="series cannot be read"):
        ray_patches.load_series(patches)
