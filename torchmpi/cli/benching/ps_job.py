"""Inside a job of ``torchmpi bench ps``: its parts, one after another."""

from __future__ import annotations

import argparse
from typing import Any

from .job import Job, job_facts
from .ps_link import measure_link
from .ps_loads import measure_idle, measure_storm
from .ps_speed import measure_speed

_MEASURES = {"speed": measure_speed, "idle": measure_idle, "storm": measure_storm, "link": measure_link}


def measure_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Rows of all parts asked for. Collective."""
    rows = [row for part in options.parts for row in _MEASURES[part](job, options)]
    return {"facts": job_facts(job.comm), "rows": rows}
