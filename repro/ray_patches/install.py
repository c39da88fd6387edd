"""Put the series on an installed Ray, take it off again, and say what is there. Never imports Ray.

Every file a patch touches has a known digest before and after each patch, so a file's digest alone says how many of
its patches it has, and the content at any other position follows from the diffs. There is no journal to lose: after a
crash each file is whole and at a known position, and ``apply`` or ``revert`` moves it on from there.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Literal

from repro.errors import InputError, MachineError, UsageError, WaitTimeoutError
from repro.ray_patches.series import ABSENT, PATCHES_DIR, FileChange, Patch, digest, load_series

State = Literal["applied", "not applied", "partly applied", "edited"]
LOCK_LIMIT_S = 60.0

_REINSTALL = "Reinstall it, also where an older kit patched it: pip install --force-reinstall --no-deps ray=={version}."
_DELETE = "Delete it, also where an older kit put it there: no Ray has it."


@dataclass(frozen=True)
class PatchStatus:
    """State of one patch; ``files`` maps each file it touches to "applied", "not applied" or "edited"."""

    patch: Patch
    state: State
    files: dict[str, str]


@dataclass(frozen=True)
class Status:
    """What of the series is on one Ray package."""

    ray_dir: Path
    version: str
    patches: tuple[PatchStatus, ...]

    def problems(self, names: Sequence[str] | None = None) -> list[str]:
        """A line for each named patch (all without names) that is not applied, with the files that are why."""
        return [
            f"{one.patch.name} is {one.state} ({_listed(one.files)})"
            for one in self.patches
            if one.state != "applied" and (names is None or one.patch.name in names)
        ]


def find_ray(ray_dir: Path | None = None) -> Path:
    """The ray package to work on.

    ``ray_dir`` may be the package itself, the folder that holds it (site-packages), or a checkout of Ray; without one
    it is the package that ``import ray`` would load here. ``MachineError`` where there is none.
    """
    if ray_dir is not None:
        for candidate in (ray_dir, ray_dir / "ray", ray_dir / "python" / "ray"):
            if (candidate / "_version.py").is_file():
                return candidate.resolve()
        raise MachineError(
            f"{ray_dir} holds no ray package.",
            remedy="Name the package, the site-packages folder that holds it, or a checkout of Ray.",
        )
    spec = importlib.util.find_spec("ray")
    if spec is None or not spec.origin:
        raise MachineError(
            "Ray is not installed in this Python.", remedy="Install the kit's dependencies, or name a Ray: --ray=DIR."
        )
    return Path(spec.origin).parent.resolve()


def ray_version(ray_dir: Path) -> str:
    """Version of a ray package, read from its ``_version.py``."""
    path = ray_dir / "_version.py"
    try:
        match = re.search(r'^version = "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}.") from None
    if not match:
        raise MachineError(f"{path} names no version.")
    return match[1]


def status(ray_dir: Path | None = None, *, patches_dir: Path = PATCHES_DIR) -> Status:
    """State of every patch. ``MachineError`` if the Ray is of another version than the series is for."""
    return _Package(find_ray(ray_dir), load_series(patches_dir)).status()


def apply(
    ray_dir: Path | None = None, names: Sequence[str] | None = None, *, patches_dir: Path = PATCHES_DIR
) -> Status:
    """Apply the named patches (all without names) and return the state after; what is applied already stays.

    All or nothing: an edited file, a diff that does not fit or a failing write leaves every file as it was.
    ``MachineError`` for those, and for another version of Ray; ``UsageError`` for unknown names, and where a file
    would need a patch that is neither named nor applied.
    """
    package = _Package(find_ray(ray_dir), load_series(patches_dir))
    chosen = package.chosen(names)
    with package.locked():
        package.move(
            {
                path: max(package.position(path), *(at + 1 for at, (name, _) in enumerate(chain) if name in chosen))
                for path, chain in package.chains.items()
                if any(name in chosen for name, _ in chain)
            },
            chosen,
        )
        return package.status()


def revert(
    ray_dir: Path | None = None, names: Sequence[str] | None = None, *, patches_dir: Path = PATCHES_DIR
) -> Status:
    """Take the named patches (all without names) off, byte for byte, and return the state after.

    Errors as ``apply``.
    """
    package = _Package(find_ray(ray_dir), load_series(patches_dir))
    chosen = package.chosen(names)
    with package.locked():
        package.move(
            {
                path: min(package.position(path), *(at for at, (name, _) in enumerate(chain) if name in chosen))
                for path, chain in package.chains.items()
                if any(name in chosen for name, _ in chain)
            },
            chosen,
        )
        return package.status()


def verify(
    ray_dir: Path | None = None, names: Sequence[str] | None = None, *, patches_dir: Path = PATCHES_DIR
) -> Status:
    """Return the state if the named patches (all without names) are applied and are what this Python would run.

    ``MachineError`` says which patch is not and because of which file, or which file's byte-code is not its source.
    """
    package = _Package(find_ray(ray_dir), load_series(patches_dir))
    chosen = package.chosen(names)
    found = package.status()
    problems = found.problems(list(chosen))
    if problems:
        raise MachineError(
            f"The Ray in {package.ray_dir}: {'; '.join(problems)}.", remedy="python -m repro patches apply."
        )
    for patch in package.patches:
        for change in patch.files if patch.name in chosen else ():
            _verify_bytecode(package.ray_dir / change.path)
    return found


def digests(ray_dir: Path | None = None, *, patches_dir: Path = PATCHES_DIR) -> list[dict[str, Any]]:
    """For ``run.json``: name, sha256 of the patch file, and state of every patch."""
    return [
        {"name": one.patch.name, "sha256": one.patch.sha256, "state": one.state}
        for one in status(ray_dir, patches_dir=patches_dir).patches
    ]


def overlay(
    dest: Path, patches: Sequence[str], *, ray_dir: Path | None = None, patches_dir: Path = PATCHES_DIR
) -> Path:
    """A second ray package, ``dest``/ray, with exactly the named patches, whatever the installed one has.

    Returns ``dest``, which belongs at the front of PYTHONPATH: Ray finds its executables and scripts beside its own
    ``__init__.py``, and every process it starts inherits the variable. Files without a patch are hard links where the
    file system allows it (so never edit one in place), files of the series are copies. ``dest`` must not exist or be
    empty.
    """
    package = _Package(find_ray(ray_dir), load_series(patches_dir))
    chosen = package.chosen(patches)
    if dest.exists() and any(dest.iterdir()):
        raise UsageError(f"{dest} is not empty.", remedy="Name a new folder for the overlay.")
    targets = {path: sum(name in chosen for name, _ in chain) for path, chain in package.chains.items()}
    for path, target in targets.items():
        package.check_order(path, 0, target, chosen)
    contents = package.contents_at(targets)
    touched = {Path(path) for path in targets}

    def left_out(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(package.ray_dir)
        if inside.name == "__pycache__":
            return [name for name in names if inside.parent / f"{name.partition('.')[0]}.py" in touched]
        return [name for name in names if inside / name in touched]

    copy = dest / "ray"
    try:
        shutil.copytree(package.ray_dir, copy, copy_function=_link, ignore=left_out)
        for path, content in contents.items():
            if content is not None:
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                (copy / path).write_bytes(content)
    except BaseException as error:
        shutil.rmtree(copy, ignore_errors=True)
        if isinstance(error, OSError):
            raise MachineError(f"The overlay of Ray in {dest} could not be made: {error}.") from None
        raise
    return dest


class _Package:
    """A ray package and the series for it.

    ``chains`` maps each touched file to its patches in order. A file's *position* is how many of them it has.
    """

    def __init__(self, ray_dir: Path, patches: list[Patch]) -> None:
        self.ray_dir = ray_dir
        self.patches = patches
        self.version = ray_version(ray_dir)
        for patch in patches[:1]:
            if patch.base_version != self.version:
                raise MachineError(
                    f"The patches are for Ray {patch.base_version}; {ray_dir} is Ray {self.version}.",
                    remedy=f'pip install "ray[data]=={patch.base_version}".',
                )
        self.chains: dict[str, list[tuple[str, FileChange]]] = {}
        for patch in patches:
            for change in patch.files:
                self.chains.setdefault(change.path, []).append((patch.name, change))

    def chosen(self, names: Sequence[str] | None) -> frozenset[str]:
        known = [patch.name for patch in self.patches]
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise UsageError(f"Unknown patch {', '.join(unknown)}; known: {', '.join(known) or 'none'}.")
        return frozenset(known if names is None else names)

    def status(self) -> Status:
        positions = {path: self.found_position(path) for path in self.chains}
        return Status(self.ray_dir, self.version, tuple(self._patch_status(patch, positions) for patch in self.patches))

    def _patch_status(self, patch: Patch, positions: dict[str, int | None]) -> PatchStatus:
        files = {}
        for change in patch.files:
            position = positions[change.path]
            place = [name for name, _ in self.chains[change.path]].index(patch.name)
            files[change.path] = "edited" if position is None else "applied" if position > place else "not applied"
        found = set(files.values())
        state: State
        if "edited" in found:
            state = "edited"
        elif found == {"applied"}:
            state = "applied"
        else:
            state = "partly applied" if "applied" in found else "not applied"
        return PatchStatus(patch, state, files)

    def content(self, path: str) -> bytes | None:
        try:
            return (self.ray_dir / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MachineError(f"{self.ray_dir / path} cannot be read: {error.strerror}.") from None

    def found_position(self, path: str) -> int | None:
        """How many of its patches the file has; None if it is in no state that the series knows."""
        chain = self.chains[path]
        known = [chain[0][1].before, *(change.after for _, change in chain)]
        found = digest(self.content(path))
        return known.index(found) if found in known else None

    def position(self, path: str) -> int:
        position = self.found_position(path)
        if position is None:
            chain = self.chains[path]
            names = ", ".join(name for name, _ in chain)
            how = "is missing" if self.content(path) is None else "has been edited"
            raise MachineError(
                f"{self.ray_dir / path} {how}: it is neither Ray {self.version}'s nor as {names} leaves it. "
                "Nothing was changed.",
                remedy=_DELETE if chain[0][1].before == ABSENT else _REINSTALL.format(version=self.version),
            )
        return position

    def check_order(self, path: str, start: int, stop: int, chosen: frozenset[str]) -> None:
        """``UsageError`` if a patch between two positions of a file is not ``chosen``."""
        others = [name for name, _ in self.chains[path][start:stop] if name not in chosen]
        if others:
            raise UsageError(f"{', '.join(sorted(chosen))} without {', '.join(others)}: both change {path}.")

    def contents_at(self, targets: dict[str, int]) -> dict[str, bytes | None]:
        """Content of each file at its target position; None where it does not exist there."""
        contents = {}
        for path, target in targets.items():
            chain = self.chains[path]
            content, position = self.content(path), self.position(path)
            try:
                for _, change in chain[position:target]:
                    content = change.forward(content)
                for _, change in reversed(chain[target:position]):
                    content = change.backward(content or b"")
            except InputError as error:
                raise InputError(f"{error.message} Nothing was changed.") from None
            contents[path] = content
        return contents

    def move(self, targets: dict[str, int], chosen: frozenset[str]) -> None:
        """Bring each file to its target position, all or none of them."""
        for path in self.chains:
            left_over = _staged(self.ray_dir / path)
            if left_over.exists():
                left_over.unlink()
        for path, target in targets.items():
            position = self.position(path)
            self.check_order(path, min(position, target), max(position, target), chosen)
        contents = self.contents_at(targets)
        changed = {path: content for path, content in contents.items() if content != self.content(path)}
        _write_all({self.ray_dir / path: content for path, content in changed.items()}, self.ray_dir)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One change at a time. The lock is on the package folder itself, so nothing is left in it."""
        folder = os.open(self.ray_dir, os.O_RDONLY)
        try:
            deadline = time.monotonic() + LOCK_LIMIT_S
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WaitTimeoutError(
                            f"Another process has been changing {self.ray_dir} for {LOCK_LIMIT_S:.0f} s."
                        ) from None
                    time.sleep(0.05)
                except OSError as error:
                    raise MachineError(f"{self.ray_dir} cannot be locked: {error.strerror}.") from None
            yield
        finally:
            os.close(folder)


def _write_all(contents: dict[Path, bytes | None], root: Path) -> None:
    """Give each file its content (None removes it), or leave all of them as they were and raise ``MachineError``.

    New contents are complete on disk under temporary names before the first file is replaced. Replacing, rather than
    writing in place, also keeps hard links of the file (uv's cache, an overlay) as they are.
    """
    previous = {path: path.read_bytes() if path.exists() else None for path in contents}
    with ExitStack() as undo:
        try:
            for path, content in contents.items():
                if content is not None:
                    undo.callback(_remove_empty_folders, path.parent, root)
                    undo.callback(_staged(path).unlink, missing_ok=True)
                    _stage(_staged(path), content, like=path)
            for path in contents:
                undo.callback(_restore, path, previous[path])
                _swap(path, contents[path])
        except OSError as error:
            problem = f"{error.filename or root} cannot be changed: {error.strerror}."
            try:
                undo.close()
            except OSError as second:
                problem += f" Taking back what had been changed failed too: {second}. See: patches status."
            else:
                problem += " Nothing was changed."
            raise MachineError(
                problem,
                remedy="Run as the owner of this Python environment, or make one of your own (python -m venv).",
            ) from None
        undo.pop_all()
    for path, content in contents.items():
        _forget_bytecode(path)
        if content is None:
            _remove_empty_folders(path.parent, root)


def _staged(path: Path) -> Path:
    """Where the next content of ``path`` is made. A fixed name: what a crash leaves is found and removed next time."""
    return path.with_name(f".{path.name}.patching")


def _stage(path: Path, content: bytes, *, like: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if like.exists():
        before = like.stat()
        path.chmod(before.st_mode & 0o7777)
        if (before.st_uid, before.st_gid) != (path.stat().st_uid, path.stat().st_gid):
            os.chown(path, before.st_uid, before.st_gid)
        # Byte-code is matched to its source by size and whole seconds of the time of change.
        if int(path.stat().st_mtime) == int(before.st_mtime):
            os.utime(path, (before.st_atime, before.st_mtime + 1))


def _swap(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        _staged(path).replace(path)


def _restore(path: Path, content: bytes | None) -> None:
    """Undo of ``_swap``; writes only where it has to."""
    found = path.read_bytes() if path.exists() else None
    if found == content:
        return
    if content is None:
        path.unlink()
    else:
        _stage(_staged(path), content, like=path)
        _staged(path).replace(path)


def _forget_bytecode(path: Path) -> None:
    """Remove compiled copies of a source file, of every Python version and optimisation level."""
    compiled = set(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))
    compiled.add(Path(importlib.util.cache_from_source(str(path))))
    for file in compiled:
        file.unlink(missing_ok=True)


def _verify_bytecode(path: Path) -> None:
    if path.suffix != ".py":
        return
    loader = SourceFileLoader(path.stem, str(path))
    try:
        compiled = loader.source_to_code(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise MachineError(f"{path} does not compile: {error}.") from None
    if loader.get_code(path.stem) != compiled:
        raise MachineError(f"Python would load {path} from byte-code of another content.", remedy="Delete __pycache__.")


def _remove_empty_folders(folder: Path, root: Path) -> None:
    """Remove ``folder`` and its parents below ``root`` as far as nothing but an empty ``__pycache__`` is in them."""
    while folder != root and root in folder.parents and folder.exists():
        with suppress(OSError):
            (folder / "__pycache__").rmdir()
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _listed(files: dict[str, str]) -> str:
    return ", ".join(f"{path}: {state}" for path, state in files.items())
