"""The folder of a Ray node that holds what profilers and devices write there; the driver fetches files from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_node(path: str) -> Path:
    """A relative path is in this node's ``report_folder``: the driver, on another node, cannot name a folder here."""
    return Path(path) if Path(path).is_absolute() else report_folder() / path


def report_folder() -> Path:
    """Where this node's Ray keeps reports of profilers: ``logs/nsight`` of its session."""
    import ray

    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) / "logs" / "nsight"
