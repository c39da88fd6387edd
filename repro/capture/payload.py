"""How much of a batch travels through Ray on the emulated device."""

from __future__ import annotations

from dataclasses import dataclass

from repro.device.model import DeviceModel
from repro.results import PayloadRecord
from repro.spec import RunSpec

_MARGIN = 0.9
"""The producers must need no more than this share of the time that the GPU stage takes for a batch."""
_SMALLEST_SHARE = 32
"""``auto`` never cuts below this fraction of the rows: less would no longer show a store at work."""


@dataclass(frozen=True)
class Costs:
    """What this machine has and charges: cores, and CPU time of a MiB through the object store."""

    cores: int
    store_ms_per_mib: float


def stage_ms(spec: RunSpec, model: DeviceModel) -> float:
    """Time of one serial call of the GPU stage by the model: pageable H2D, matmuls, pageable D2H."""
    h2d_ns = model.copy_ns(spec.batch_bytes, to_device=True, pinned=False)
    d2h_ns = model.copy_ns(spec.batch_bytes, to_device=False, pinned=False)
    return (h2d_ns + spec.matmuls * model.matmul_ns(spec.rows, spec.cols) + d2h_ns) / 1e6


def choose_payload(spec: RunSpec, model: DeviceModel, costs: Costs) -> PayloadRecord:
    """The rows that travel, by ``spec.payload``.

    ``auto``: a batch costs a producer its prep and two ways through the object store (the batch in, the
    result out). All cores but the one of the GPU stage produce. Rows are halved until that fits into
    90% of the stage's time, or 1/32 is left.
    """
    producers = max(1, costs.cores - 1)
    budget_ms = _MARGIN * stage_ms(spec, model) * producers
    row_mib = spec.cols * 4 / 2**20

    def cost_ms(rows: int) -> float:
        return spec.prep_ms + 2 * rows * row_mib * costs.store_ms_per_mib

    if spec.payload == "full":
        return full_payload(spec, "asked for: the whole batch travels")
    if isinstance(spec.payload, int):
        rows = min(spec.payload, spec.rows)
        return _record(spec, rows, f"asked for: {rows} of {spec.rows} rows travel")
    rows = spec.rows
    while cost_ms(rows) > budget_ms and rows * _SMALLEST_SHARE > spec.rows:
        rows = max(1, rows // 2)
    fed = "can" if cost_ms(rows) <= budget_ms else "still cannot"
    reason = (
        f"auto: {costs.cores} cores, {costs.store_ms_per_mib:.2f} ms of CPU a MiB through the object store; "
        f"with {rows} of {spec.rows} rows {producers} of them {fed} prepare a batch "
        f"in {_MARGIN:.0%} of the {stage_ms(spec, model):.1f} ms that the GPU stage takes"
    )
    return _record(spec, rows, reason)


def full_payload(spec: RunSpec, reason: str) -> PayloadRecord:
    """The whole batch."""
    return _record(spec, spec.rows, reason)


def _record(spec: RunSpec, rows: int, reason: str) -> PayloadRecord:
    return PayloadRecord(
        nominal_bytes=spec.batch_bytes, travelled_bytes=rows * spec.cols * 4, travelled_rows=rows, reason=reason
    )
