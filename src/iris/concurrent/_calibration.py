"""What the predictor takes from measurements, beside the figures of machines and of :mod:`iris.tuning.cost_model`.

A value is for a machine, for all of a family (:attr:`iris._target.Target.family`), or for everything else (``""``).
``docs/concurrent-tuning.md`` shows the table. *Published* are figures of upstream's kernels on MI300X (ROCm/iris, pull
request 544); of AMD devices nothing has been measured with this library's own. What is for everything else was measured
on H200 and is taken for other NVIDIA devices, too.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from iris.tuning._calibration import Figures, values_for

_PUBLISHED = "published: upstream's predictor for MI300X"
_FITTED = "fitted: the grids of H200 in benchmarks/data/concurrent_h200.json and concurrent_h200_alone.json"
_300 = "fitted: the three grids of 8 MI300X in benchmarks/data/concurrent_mi300x.json, upstream's kernel"
_355 = "fitted: the grid of 8 MI355X in benchmarks/data/concurrent_mi355x.json, upstream's kernel"

FIGURES: Figures = {
    "origami_scale": (
        "how many times as long as origami says a product takes alone",
        {"": (1.37, _PUBLISHED + ", 4096 products: origami over measured is 0.73")},
    ),
    "tile_scale": (
        "how many times as long as the cost model says a tile's matrix instructions take, in a product alone",
        {
            "": (1.0, "the cost model's own calibration"),
            "mi300x": (0.31, _300),
            "mi325x": (0.31, "assumed: as on the MI300X, which has the same compute units"),
            "mi350x": (0.63, "assumed: as on the MI355X, which has the same compute units"),
            "mi355x": (0.63, _355),
        },
    ),
    "load_bytes_per_s": (
        "rate at which a tile's operands come while no matrix instructions go on, bytes/s",
        {
            "": (1e18, "they come meanwhile, as the cost model has it"),
            "mi300x": (43e9, _300),
            "mi325x": (43e9, "assumed: as on the MI300X, which has the same compute units"),
            "mi350x": (73e9, "assumed: as on the MI355X, which has the same compute units"),
            "mi355x": (73e9, _355),
        },
    ),
    "fused_scale": (
        "how many times as long a tile of the GEMM takes in the kernel with two queues as in one of its own",
        {
            "": (1.0, "the K loop is the library's one GEMM, whose time is the cost model's"),
            "gfx": (1.44, _PUBLISHED + "; the fits of tile_scale and load_bytes_per_s go with it"),
        },
    ),
    "interference": (
        "by what share a GEMM takes longer when all programs are in the collective all the while",
        {"": (0.0, _FITTED + ", which show none"), "gfx": (0.40, _PUBLISHED)},
    ),
    "comm_share": (
        "share of the links' attainable rate that a collective gets beside a GEMM",
        {
            "": (0.9, _FITTED + "; alone a gather of 580 MB gets 0.98"),
            "gfx": (0.36, _PUBLISHED + ", 120 GB/s, of the 336 that 7 links attain"),
        },
    ),
    "comm_start_s": (
        "time of a collective beside its bytes, s",
        {"": (3e-6, _FITTED), "gfx": (5e-6, _PUBLISHED)},
    ),
    "program_bytes_per_s": (
        "most that a program moves over the links beside a GEMM, bytes/s",
        {
            "": (14e9, _FITTED + "; alone 9 programs of 1024 threads push 206 GB/s and fetch 142"),
            "gfx": (7.5e9, "assumed: as alone, a gather between 8 MI355X; iris.tuning._calibration"),
            "mi300x": (0.3e9, _300),
            "mi325x": (0.3e9, "assumed: as on the MI300X, which has the same links"),
        },
    ),
    "channels": (
        "what the number of programs is counted in that an all_reduce needs for the rate of the links",
        {"": (1.0, "nothing is known beyond what the rates of programs say"), "gfx": (64.0, _PUBLISHED)},
    ),
    "channels_all_reduce": (
        "how many times channels an all_reduce needs at least",
        {"": (2.0, _FITTED), "gfx": (2.0, _PUBLISHED + "; with fewer than 128 of 304 it takes many times as long")},
    ),
    "take_tile_s": (
        "time of taking a tile of the GEMM from its queue, s",
        {"": (2.2e-6, _FITTED), "gfx": (0.99e-6, _PUBLISHED + "; a quarter of the median of 3.96 us that it takes")},
    ),
    "take_item_s": (
        "the same of the collective",
        {"": (2.1e-6, _FITTED), "gfx": (2.36e-6, _PUBLISHED + "; a quarter of the median of 9.44 us that it takes")},
    ),
    "tile_margin": (
        "by what share another tile than the usual one has to be predicted to be faster to be taken",
        {"": (0.20, _PUBLISHED)},
    ),
}


class Calibration(NamedTuple):
    """The values for one machine, named as in :data:`FIGURES`."""

    origami_scale: float
    tile_scale: float
    load_bytes_per_s: float
    fused_scale: float
    interference: float
    comm_share: float
    comm_start_s: float
    program_bytes_per_s: float
    channels: float
    channels_all_reduce: float
    take_tile_s: float
    take_item_s: float
    tile_margin: float


@cache
def calibration(machine: str, family: str) -> Calibration:
    """The values for a machine: its own, else its family's, else those for everything else."""
    return Calibration(**values_for(FIGURES, machine, family))


def table() -> list[str]:
    """The lines of the table of the documentation."""
    lines = ["| figure | means | of | value | source |", "|---|---|---|---|---|"]
    for name, (meaning, places) in FIGURES.items():
        for place, (value, source) in places.items():
            of = {"": "all others" if len(places) > 1 else "all", "gfx": "other AMD"}.get(place, place)
            lines.append(f"| {name} | {meaning} | {of} | {value:.4g} | {source} |")
    return lines
