"""What choosing a configuration costs the host: warm and cold look-ups, and the parts of a cold one. No GPU needed.

python benchmarks/bench_selection.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

PROBLEM = {"M": 131072, "N": 16384, "K": 16384, "world_size": 8, "arch": "mi300x"}
# A fresh process for each, since what is read once stays. Not counted: importing iris.ops, which programs do anyway.
COLD = """
import json, sys, time
import iris.ops.auto_config as auto_config
start = time.perf_counter()
result = auto_config.select_ag_mm_config(**json.loads(sys.argv[1]))
print(time.perf_counter() - start)
"""
SOURCES = {
    "exact": {},
    "nearest": {"M": 130000},
    "disabled": {"world_size": 4},
    "heuristic": {"M": 50000},
    "predicted": {"gather_dim": 0},
    "machine without a table": {"arch": "b200"},
}


def microseconds(call, repeats):
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def cold_milliseconds(problem, repeats=5):
    """Median of the first look-up in fresh processes."""
    command = [sys.executable, "-c", COLD, json.dumps(problem)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(repeats)]
    return statistics.median(float(run.stdout) for run in runs) * 1e3


def main():
    from iris.ops import auto_config

    print("| look-up | warm, us | tables read, nothing remembered, us | first in a process, ms |")
    print("|---|---|---|---|")
    for name, change in SOURCES.items():
        problem = PROBLEM | change
        warm = microseconds(lambda problem=problem: auto_config.select_ag_mm_config(**problem), 20000)

        def forgotten(problem=problem):
            auto_config._results.clear()
            auto_config.select_ag_mm_config(**problem)

        source = auto_config.select_ag_mm_config(**problem).source
        print(f"| {name} | {warm:.2f} | {microseconds(forgotten, 500):.0f} | {cold_milliseconds(problem):.1f} |")
        print(f"  {source}", file=sys.stderr)


if __name__ == "__main__":
    main()
