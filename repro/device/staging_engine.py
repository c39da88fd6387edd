"""The emulated device as a copy engine of Ray's pinned staging (``patches/pinned-staging.patch``).

Ray never imports the kit by name: ``EmulatedEngineFactory`` goes into ``PinnedStagingOptions(engine=...)``. In the
actor the factory and the GPU stage share one device, so ``shared_device`` gives out one per process and plan. Ray's
stager calls the engine as it calls its CUDA engine: same slots, same chunks, same events.

Sizes. With a scaled payload a byte that travels stands for ``scale`` nominal bytes: in copies, in pinning, and in
what a host copy between pageable memory and a slot is charged.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.device.emulated import EmulatedArray, EmulatedDevice, EmulatedPinnedBuffer, open_emulated
from repro.device.node_folder import on_node
from repro.device.protocol import Event


@dataclass(frozen=True)
class EmulatedEngineFactory:
    """Makes the engine in the actor. ``model`` and ``log`` name the device; ``scale`` is nominal bytes a real byte."""

    model: str
    log: str | None
    scale: float = 1.0

    def __call__(self) -> EmulatedCopyEngine:
        return EmulatedCopyEngine(shared_device(self.model, self.log), self.scale)


_devices: dict[tuple[str, str | None], EmulatedDevice] = {}
_devices_lock = threading.Lock()


def shared_device(model: str, log: str | None) -> EmulatedDevice:
    """The process's device of this model and log, opened on first use."""
    with _devices_lock:
        if (model, log) not in _devices:
            _devices[model, log] = open_emulated(model, None if log is None else on_node(log))
        return _devices[model, log]


class EmulatedCopyEngine:
    """``ray.data._internal.pinned_staging.CopyEngine`` by shape; the contracts are described there.

    The GPU stage works on the device's default stream, as it does on CUDA.
    """

    def __init__(self, device: EmulatedDevice, scale: float) -> None:
        self.device = device
        self._scale = scale
        self._h2d = device.new_stream("staging H2D")
        self._d2h = device.new_stream("staging D2H")
        self._pinned: dict[int, EmulatedPinnedBuffer] = {}

    def _nominal(self, size_bytes: int) -> int:
        return round(size_bytes * self._scale)

    def pin(self, nbytes: int) -> np.ndarray:
        buffer = self.device.pin_empty((nbytes,), np.uint8, nominal_bytes=self._nominal(nbytes))
        self._pinned[id(buffer.array)] = buffer
        return buffer.array

    def unpin(self, buffer: np.ndarray) -> None:
        self._pinned.pop(id(buffer)).free()

    def supports(self, dtype: np.dtype[Any]) -> bool:
        return dtype.itemsize in (1, 2, 4, 8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> EmulatedArray:
        array = self.device.empty(shape, dtype)
        array.nominal_bytes = self._nominal(array.nbytes)
        return array

    def copy_h2d(self, source: np.ndarray, target: EmulatedArray, offset: int) -> Event:
        self.device.copy_h2d(source, self._h2d, nominal_bytes=self._nominal(source.nbytes), into=target, offset=offset)
        return self._h2d.record_event()

    def begin_use(self, arrays: Sequence[EmulatedArray], ready: Event) -> None:
        self.device.default_stream().wait_event(ready)

    def is_device_array(self, value: Any) -> bool:
        return isinstance(value, EmulatedArray)

    def end_use(self, arrays: Sequence[EmulatedArray]) -> tuple[list[EmulatedArray], Event]:
        return list(arrays), self.device.default_stream().record_event()

    def spec(self, array: EmulatedArray) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return array.shape, array.dtype

    def copy_d2h(self, source: EmulatedArray, offset: int, target: np.ndarray) -> Event:
        self.device.copy_d2h(source, self._d2h, out=target, offset=offset)
        return self._d2h.record_event()

    def host_copy(self, target: np.ndarray, source: np.ndarray) -> None:
        with self.device.charge_host_copy(self._nominal(source.nbytes)):
            np.copyto(target, source)

    def close(self) -> None:
        """The device stays open: the GPU stage may still use it, and its log is whole after every call."""
