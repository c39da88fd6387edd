"""The staging scenarios must fail when a wait or a lock is taken out of ``pinned_staging``.

Every mutation replaces one line of the module that the patch adds; the scenario that is to notice is named. A line
that is not there exactly once fails the test too, so a rewrite cannot leave a mutation behind that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from staging_fakes import load, patched_source
from staging_scenarios import Scenario, check_ring, check_stage_order, run_scenario


def late_device(module: ModuleType) -> None:
    """Nothing completes before it is waited for; three slots for many chunks."""
    for seed in range(3):
        run_scenario(module, Scenario(seed, 0.0, 64, 3, 3, (30, 11, 0, 17, 30, 5)))


def eager_device(module: ModuleType) -> None:
    for seed in range(10):
        run_scenario(module, Scenario(seed, 0.6, 16, 3, 3, (30, 11, 0, 17, 30, 5)))


NO_LOCK = """type(
            "NoLock", (), {
                "__enter__": lambda self: None,
                "__exit__": lambda self, *error: None,
                "wait": lambda self: time.sleep(0.001),
                "notify": lambda self: None,
                "notify_all": lambda self: None,
            },
        )()"""

MUTATIONS: dict[str, tuple[str, str, Callable[[ModuleType], None]]] = {
    "the wait for a slot's last copy": (
        "                slot.event.synchronize()\n        except BaseException:",
        "                pass\n        except BaseException:",
        late_device,
    ),
    "the event of a slot in use": (
        "            finally:\n                self._ring.release(slot, event)\n",
        "            finally:\n                self._ring.release(slot, None)\n",
        late_device,
    ),
    "the lock of the ring": ("self._changed = threading.Condition()", f"self._changed = {NO_LOCK}", check_ring),
    "the lock around staging": (
        "self._stage_lock = threading.Lock()",
        f"self._stage_lock = {NO_LOCK}",
        check_stage_order,
    ),
    "the UDF's wait for its inputs": (
        "            self._engine.begin_use(staged.arrays, staged.ready)",
        "            pass",
        late_device,
    ),
    "the wait for the UDF's results": ("            output.done.synchronize()", "            pass", late_device),
    "the wait for a copy to the host": ("            event.synchronize()\n", "            pass\n", late_device),
    "the last copy of a batch": (
        "staged.ready = self._upload(column, array) or staged.ready",
        "staged.ready = staged.ready or self._upload(column, array)",
        eager_device,
    ),
    "the wait for copies before memory is freed": (
        "                    slot.event.synchronize()\n                except Exception:",
        "                    pass\n                except Exception:",
        lambda module: unpin_under_a_copy(module),
    ),
}


def unpin_under_a_copy(module: ModuleType) -> None:
    import numpy as np
    from staging_fakes import FakeEngine

    engine = FakeEngine(0, eager=0.0)
    stager = module.BatchStager(module.PinnedStagingOptions(slot_bytes=8, max_pinned_bytes=64, engine=lambda: engine))
    stager.stage({"x": np.arange(3.0)})
    stager.close()
    assert not engine.faults


@pytest.mark.parametrize("what", MUTATIONS)
def test_taking_it_out_is_noticed(what: str) -> None:
    line, replacement, scenario = MUTATIONS[what]
    source = patched_source()
    assert source.count(line) == 1, f"{what}: the line to mutate is not there once"
    scenario(load(source))
    with pytest.raises(AssertionError):
        scenario(load(source.replace(line, replacement)))
