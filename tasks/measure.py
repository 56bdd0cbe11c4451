"""Measure the number of lanes that trains fastest here: `python -m fp4dse.tasks.measure LEAST MOST SHARE`.

Standard input is a Job with lanes of the recipes to measure. Whenever a number of lanes was measured, a line of
standard output is the best number so far: between LEAST and MOST, and no more than fit into 1/SHARE of the free memory.
"""

from __future__ import annotations

import sys

import msgspec

from fp4dse.tasks.engine.lane_counts import free_memory, search_lanes
from fp4dse.tasks.job import Job
from fp4dse.tasks.threads import torch_threads
from fp4dse.tasks.worker import task_of


def main(least: int, most: int, share: int) -> None:
    """Measure."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    recipes = list(dict.fromkeys(lane.recipe for lane in job.lanes))
    memory = free_memory(job.device) / share
    with torch_threads(job.threads):
        for lanes in search_lanes(task_of(job), recipes, job.device, memory, most, least):
            print(lanes, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
