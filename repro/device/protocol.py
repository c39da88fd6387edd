"""What the GPU stage, the staging engines and the captures need of a device.

Two devices implement it: ``repro.device.emulated`` (streams and engines over a time model) and
``repro.device.cuda`` (torch). The rules are CUDA's: work on one stream runs in order; a copy from pageable memory
blocks the calling thread until it is done; a copy from pinned memory returns at once; an event is done when the work
recorded before it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """True when all work recorded before the event has finished."""

    def synchronize(self) -> None:
        """Block the calling thread until the event is done."""


class Stream(Protocol):
    """An in-order queue of device work."""

    stream_id: int

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """Later work on this stream starts only after ``event``; the host does not block."""

    def synchronize(self) -> None: ...


class PinnedBuffer(Protocol):
    """Page-locked host memory. ``array`` is its numpy view; ``nominal_bytes`` what copies of it are accounted at."""

    array: np.ndarray
    nominal_bytes: int

    def free(self) -> None: ...


class DeviceArray(Protocol):
    """An array on the device. ``nominal_bytes`` is what its copies are accounted at (equal to ``nbytes`` on CUDA)."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    nominal_bytes: int


class Device(Protocol):
    """One GPU, real or emulated. Thread-safe: several threads may issue work, each on its own stream.

    ``nominal_bytes`` arguments let the emulated device account a copy at the size of the published batch
    while fewer bytes travel; CUDA refuses a value that differs from the real size.
    """

    kind: Literal["emulated", "cuda"]
    name: str
    device_id: int

    def default_stream(self) -> Stream: ...

    def new_stream(self, name: str = "") -> Stream: ...

    def pin_empty(self, shape: tuple[int, ...], dtype: Any, *, nominal_bytes: int | None = None) -> PinnedBuffer:
        """Allocate pinned host memory. Blocks for what pinning costs."""

    def copy_h2d(
        self, source: np.ndarray | PinnedBuffer, stream: Stream, *, nominal_bytes: int | None = None
    ) -> DeviceArray:
        """Copy to the device on ``stream``. Blocks the caller if ``source`` is pageable (a numpy array)."""

    def copy_d2h(
        self, source: DeviceArray, stream: Stream, *, out: np.ndarray | PinnedBuffer | None = None
    ) -> np.ndarray:
        """Copy to the host on ``stream``. Into pinned ``out`` it returns at once and the values are valid
        after the stream or an event is synchronised; otherwise it blocks and returns valid values."""

    def matmul(self, source: DeviceArray, stream: Stream) -> DeviceArray:
        """One matmul kernel on ``stream``; asynchronous. The shape is kept."""

    def charge_host_copy(self, nominal_bytes: int) -> AbstractContextManager[None]:
        """Around a host copy of a scaled payload: on the emulated device it lasts as long as one host thread takes for
        ``nominal_bytes``; on CUDA, where everything travels, it does nothing."""

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range around host code."""

    def synchronize(self) -> None:
        """Block until all streams are idle."""

    def close(self) -> None: ...
