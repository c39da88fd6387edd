"""Child process of ``repro.analysis.nsys_ai``, run as a file: PROFILE DEVICE ANSWER MEMORY_BYTES.

Imports nothing of the kit. Writes the skill's rows to ANSWER as JSON; any failure is a traceback and status 1.
"""

import json
import logging
import resource
import sqlite3
import sys


def main(profile: str, device: str, answer: str, memory_bytes: str) -> None:
    sys.path.pop(0)  # this folder: its modules are not the child's
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = int(memory_bytes) if hard == resource.RLIM_INFINITY else min(int(memory_bytes), hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    logging.disable(logging.WARNING)  # that it runs without DuckDB is on purpose

    from nsys_ai.skills.registry import get_skill

    skill = get_skill("gpu_idle_gaps")
    if skill is None:
        raise LookupError("nsys-ai has no skill gpu_idle_gaps")
    db = sqlite3.connect(profile)
    db.row_factory = sqlite3.Row
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    rows = skill.execute(db, device=int(device))
    db.close()
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(rows, file, default=str)


if __name__ == "__main__":
    main(*sys.argv[1:])
