"""The Ray driver of one nsight-command case: one profiled actor that says how it was started.

Needs Ray and the standard library only. ``python nsight_driver.py CONFIG``, CONFIG is JSON: ``folder`` (Ray's temporary
folder), ``runtime_env`` of the actor, ``limit_s`` for its start. Prints a JSON object a line, as ``flush_driver`` does.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TypedDict


class Config(TypedDict):
    folder: str
    runtime_env: dict[str, Any]
    limit_s: float


def _say(phase: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"phase": phase, "at_s": time.monotonic(), **facts}) + "\n")
    sys.stdout.flush()


class _Actor:
    def command(self) -> dict[str, Any]:
        """How this worker's interpreter was started."""
        return {"executable": sys.executable, "arguments": sys.orig_argv[1:], "options": sorted(sys._xoptions)}


def main(config: Config) -> None:
    """Run one case; an actor that does not start within the limit is a result, any other error is raised."""
    import ray

    _say("starting Ray")
    context: Any = ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        object_store_memory=128 * 1024**2,
        log_to_driver=False,
        _temp_dir=config["folder"],
    )
    _say("starting the actor", ray_path=ray.__file__, session=context.address_info["session_dir"])
    remote: Any = ray.remote(num_cpus=0, runtime_env=config["runtime_env"])(_Actor)
    actor = remote.remote()
    try:
        answer = ray.get(actor.command.remote(), timeout=config["limit_s"])
    except ray.exceptions.GetTimeoutError:
        _say("gave up", problem=f"no worker after {config['limit_s']:.0f} s")
    except (ray.exceptions.RayActorError, ray.exceptions.RuntimeEnvSetupError) as error:
        _say("gave up", problem=str(error))
    else:
        _say("started", **answer)
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
