"""Put the flush window into a checkout of Ray's C++ sources, or print the change as a unified diff.

``python -m repro.ray_patches.flush_source diff|apply RAY_CHECKOUT``

New files go to ``src/ray/raylet/profiler_flush``; a hook of a few lines goes into each place that has to know of them.
A hook names its file and an anchor, text that must be in that file exactly once: so the hooks fit versions that differ
elsewhere, and where an anchor is gone or ambiguous nothing at all is written.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from repro.errors import InputError, KitError, UsageError
from repro.ray_patches import unified
from repro.ray_patches.series import PATCHES_DIR

RAYLET = "src/ray/raylet"
NEW_FOLDER = f"{RAYLET}/profiler_flush"
NEW_FILES = (
    "flush_window.cc",
    "flush_window.h",
    "procfs.cc",
    "procfs.h",
    "profiler_names.h",
    "raylet_hooks.cc",
    "raylet_hooks.h",
    "raylet_proc.h",
    "window_lock.cc",
    "window_lock.h",
)


@dataclass(frozen=True)
class Hook:
    """In ``file``, ``anchor`` becomes ``text``, which holds the anchor again.

    All C++ hooks but the includes lie inside Ray's ``#if !defined(_WIN32)``: ``raylet_hooks.h`` declares nothing there.
    """

    file: str
    anchor: str
    text: str


HOOKS = (
    Hook(
        f"{RAYLET}/worker_pool.cc",
        '#include "ray/raylet/worker_pool.h"\n',
        '#include "ray/raylet/worker_pool.h"\n#include "ray/raylet/profiler_flush/raylet_hooks.h"\n',
    ),
    Hook(
        f"{RAYLET}/worker_pool.cc",
        "    worker->SetSavedProcessGroupId(pgid);\n",
        """    worker->SetSavedProcessGroupId(pgid);
    ::profiler_flush::OnWorkerRegistered(pid);
""",
    ),
    Hook(
        f"{RAYLET}/node_manager.cc",
        '#include "ray/raylet/node_manager.h"\n',
        '#include "ray/raylet/node_manager.h"\n#include "ray/raylet/profiler_flush/raylet_hooks.h"\n',
    ),
    Hook(
        f"{RAYLET}/node_manager.cc",
        "  auto err = KillProcessGroup(saved_pgid, sig);\n",
        """  // A profiler that leads the group still has to write its report.
  if (::profiler_flush::SignalTargetsInstead(saved_pgid, sig)) {
    return;
  }
  auto err = KillProcessGroup(saved_pgid, sig);
""",
    ),
    Hook(
        f"{RAYLET}/node_manager.cc",
        "#endif\n  object_manager_.Stop();\n",
        """  ::profiler_flush::WaitForAllWindows();
#endif
  object_manager_.Stop();
""",
    ),
    # node_manager depends on worker_pool, so one target brings the new files to both.
    Hook(
        f"{RAYLET}/BUILD.bazel",
        '    srcs = ["worker_pool.cc"],\n    hdrs = ["worker_pool.h"],\n',
        """    srcs = ["worker_pool.cc"] + select({
        "@platforms//os:linux": glob(["profiler_flush/*.cc"]),
        "//conditions:default": [],
    }),
    hdrs = ["worker_pool.h"] + glob(["profiler_flush/*.h"]),
""",
    ),
)


def changes(checkout: Path) -> dict[str, tuple[bytes | None, bytes]]:
    """Each file's content before and after, by its path in the checkout; ``InputError`` where a hook does not fit."""
    problems = []
    result: dict[str, tuple[bytes | None, bytes]] = {}
    for file in dict.fromkeys(hook.file for hook in HOOKS):
        try:
            old = (checkout / file).read_bytes()
        except OSError as error:
            problems.append(f"{file}: {error.strerror}")
            continue
        new = old.decode()
        for hook in (hook for hook in HOOKS if hook.file == file):
            found = old.decode().count(hook.anchor)
            if found != 1:
                problems.append(f"{file}: the anchor {hook.anchor.strip()!r} is there {found} times")
            new = new.replace(hook.anchor, hook.text)
        result[file] = (old, new.encode())
    for name in NEW_FILES:
        path = f"{NEW_FOLDER}/{name}"
        if (checkout / path).exists():
            problems.append(f"{path}: is there already")
        result[path] = (None, _for_ray(name))
    if problems:
        raise InputError(
            f"the flush window does not fit {checkout}: {'; '.join(problems)}.",
            remedy="The anchors are in repro/ray_patches/flush_source.py; nothing was written.",
        )
    return result


def diff(checkout: Path) -> bytes:
    """The change as one unified diff that ``git apply`` takes."""
    return b"".join(unified.diff(path, old, new) for path, (old, new) in changes(checkout).items())


def apply(checkout: Path) -> list[str]:
    """Write the change into the checkout and return the paths; all anchors are checked before the first write."""
    pending = changes(checkout)
    for path, (_, new) in pending.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_bytes(new)
    return list(pending)


def _for_ray(name: str) -> bytes:
    """A source of ours with its own includes named the way Ray's tree names them."""
    text = (PATCHES_DIR / "profiler_flush" / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(?=[a-z_]+\.h")', '#include "ray/raylet/profiler_flush/', text, flags=re.M).encode()


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) != 2 or arguments[0] not in ("diff", "apply"):
            raise UsageError("usage: python -m repro.ray_patches.flush_source diff|apply RAY_CHECKOUT")
        checkout = Path(arguments[1])
        if arguments[0] == "diff":
            sys.stdout.buffer.write(diff(checkout))
        else:
            sys.stdout.write("".join(f"{path}\n" for path in apply(checkout)))
    except KitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
