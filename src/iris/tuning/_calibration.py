"""What the cost model takes from measurements, beside the figures of machines: values and where each comes from.

A value is for a machine, for all of a family (:attr:`iris._target.Target.family`), or for everything else (``""``).
``docs/cost-model.md`` shows the table.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

_H200 = "two H200, benchmarks/data/h200_two.json"
_MI300X = "published MI300X rows of upstream's kernel"
_MI355X = "published MI355X rows of upstream's kernel"

# name -> what it is -> place -> (value, source)
Figures = dict[str, tuple[str, dict[str, tuple[float, str]]]]

FIGURES: Figures = {
    "kernel_efficiency": (
        "share of the peak of the matrix units that the library's GEMM loop reaches while tiles fill them",
        {
            "": (0.8, "fitted: 128x256 tiles of one rank on an H200, M from 1024 on (own_matmul_ms), " + _H200),
            "gfx": (0.33, "assumed: between the values of the MI300X and the MI355X"),
            "mi300x": (0.29, "fitted: 380 of 1307 TFLOP/s, " + _MI300X),
            "mi325x": (0.29, "assumed: as on the MI300X, which has the same compute units"),
            "mi350x": (0.45, "assumed: as on the MI355X, which has the same compute units"),
            "mi355x": (0.45, "fitted: 1130 of 2517 TFLOP/s while tiles are multiplied, " + _MI355X),
        },
    ),
    "vendor_efficiency": (
        "the same for the vendor's library",
        {
            "": (0.8, "fitted: cuBLAS on an H200, M from 1024 on (matmul_ms), " + _H200),
            "gfx": (0.5, "assumed: public GEMM figures lie between 0.4 and 0.6 of the peak"),
            "mi300x": (0.46, "fitted: 600 of 1307 TFLOP/s, what the two-rank rows leave for the product, " + _MI300X),
            "mi325x": (0.46, "assumed: as on the MI300X, which has the same compute units"),
            "mi350x": (0.58, "assumed: as on the MI355X, which has the same compute units"),
            "mi355x": (0.58, "fitted: 1460 of 2517 TFLOP/s with the gather at 371 GB/s, " + _MI355X),
        },
    ),
    "vendor_load": (
        "how many times as fast as a program of the library a compute unit gets operands in the vendor's GEMM",
        {"": (1.25, "fitted: cuBLAS with M from 64 to 512, " + _H200)},
    ),
    "vendor_link": (
        "share of the links' attainable rate that PyTorch's gather and reduce-scatter get in a stream",
        {
            "": (0.68, "fitted: NCCL on two H200 brings 250 of 369 GB/s; 8 H100 get 253 to 270 (symm-mem-recipes)"),
            "gfx": (1.0, "the figures of the links are RCCL's"),
        },
    ),
    "vendor_reduce_link": (
        "the same for PyTorch's all-reduce",
        {
            "": (0.81, "fitted: NCCL on two H200 brings 300 of 369 GB/s, " + _H200),
            "gfx": (1.0, "the figures of the links are RCCL's"),
        },
    ),
    "vendor_graph_link": (
        "the same for PyTorch's collectives in a graph of many",
        {
            "": (0.83, "fitted: NCCL on two H200 brings 305 of 369 GB/s, " + _H200),
            "gfx": (1.0, "the figures of the links are RCCL's"),
        },
    ),
    "vendor_most_bytes_per_s": (
        "most that PyTorch's gather brings to a rank, bytes/s, whatever the links give",
        {
            "": (1e15, "no such limit is known"),
            "mi300x": (35e9, "fitted: the unfused times that the speed-ups imply, after their products, " + _MI300X),
        },
    ),
    "vendor_collective_s": (
        "time of a small collective of PyTorch, s",
        {"": (12e-6, "fitted: NCCL between two H200, 0.5 MB (gather_ms), " + _H200)},
    ),
    "vendor_ramp_bytes": (
        "bytes at which a collective of PyTorch takes half of its least time more, for its pipeline",
        {"": (2e6, "fitted: NCCL between two H200, 0.5 to 8 MB (gather_ms), " + _H200)},
    ),
    "side_by_side": (
        "share of the memory's rate at which PyTorch puts gathered columns side by side",
        {"": (0.4, "fitted: 1.7 of 4.27 TB/s, torch_ms less gather_ms and matmul_ms with gather_dim=1, " + _H200)},
    ),
    "kernel_s": (
        "what a kernel of one product takes beside its tiles, s: start, first loads, last stores",
        {
            "": (6e-6, "fitted: own_matmul_ms, M from 64 to 512, " + _H200),
            "gfx": (10e-6, "assumed: in the ratio of the launch latencies"),
        },
    ),
    "fused_s": (
        "what a fused kernel takes beyond that, s: meeting the peers at its start and its end",
        {
            "": (10e-6, "fitted: rows of few bytes, " + _H200),
            "gfx": (0.8e-3, "fitted: 13 rows with M of 4096 and 5120, " + _MI300X + "; a call with its host work"),
            "mi325x": (0.2e-3, "fitted: rows with M of 1024 of upstream's kernel on MI325X; a call with its host work"),
        },
    ),
    "two_shot_meeting": (
        "share of fused_s that two_shot takes",
        {"": (0.6, "fitted: matmul_all_reduce with M from 64 to 1024, " + _H200)},
    ),
    "one_shot_meeting": (
        "share of fused_s that one_shot takes, which does not wait for its peers' end",
        {"": (0.3, "fitted: matmul_all_reduce with M from 64 to 1024, " + _H200)},
    ),
    "copies_s": (
        "from the start of a call to the first bytes that the copy engine brings, s",
        {"": (15e-6, "fitted: rows of copy_engine with M up to 1024 and gather_dim=0, " + _H200)},
    ),
    "staged_loop": (
        "how much longer a tile takes when a part of A comes from the staging buffer and flags are read",
        {"": (1.04, "fitted: hbm_buffer and copy_engine, M from 8192 on, " + _H200)},
    ),
    "fetch_bytes_per_s": (
        "most that a program fetches in an endless piece with 32 KiB under way, bytes/s",
        {
            "": (
                43e9,
                "derived: 25 to 31 GB/s in pieces of 128 KiB and 31 to 37 of 256 KiB, docs/performance.md, Fetchers",
            ),
            "gfx": (16e9, "the figure program_remote_bytes_per_s of the MI350X"),
        },
    ),
    "fetch_piece_s": (
        "what a fetcher takes for a piece beside its bytes, s: the flag, the next place in the queue",
        {"": (1.6e-6, "derived from the same figures"), "gfx": (2.1e-6, "assumed: in the ratio of remote latencies")},
    ),
    "pull_bytes_per_s": (
        "most that a program reads of peers' memory while it multiplies, bytes/s",
        {
            "": (10e9, "fitted: pull with 14 and 28 programs and gather_dim=1, " + _H200),
            "gfx": (16e9, "the figure program_remote_bytes_per_s of the MI350X"),
        },
    ),
    "send_bytes_per_s": (
        "most that a program stores into a peer's memory, bytes/s",
        {
            "": (44e9, "measured: 4 and 8 programs between two H200 put 183 and 364 GB/s, docs/performance.md"),
            "gfx": (16e9, "the figure program_remote_bytes_per_s of the MI350X"),
        },
    ),
    "add_bytes_per_s": (
        "most that a program reads and adds of partial products, bytes/s",
        {"": (20e9, "measured: a program that copies tiles of 32 KiB within an H200 moves 17 to 20 GB/s")},
    ),
    "rounds_exposed": (
        "rounds of tiles whose partial products are not hidden where sends take turns (two_shot, fused)",
        {"": (1.5, "fitted: matmul_all_reduce and matmul_reduce_scatter, " + _H200)},
    ),
    "rounds_in_step": (
        "the same where all programs send at once (one_shot), until they are out of step",
        {"": (5.0, "fitted: matmul_all_reduce, one_shot, 2 to 31 rounds, " + _H200)},
    ),
    "collective_s": (
        "time of a small collective of the library in a graph, s",
        {
            "": (5.8e-6, "measured: all_gather of 4 KiB, " + _H200),
            "gfx": (9e-6, "assumed: in the ratio of the launch latencies"),
        },
    ),
    "collective_bytes_per_s": (
        "most that a program of a collective moves to peers, bytes/s",
        {
            "": (18e9, "measured: all_gather with 16 programs between two H200, 291 GB/s, " + _H200),
            "gfx": (7.5e9, "public: 350 to 366 GB/s from 48 programs on between 8 MI355X"),
        },
    ),
    "collective_link": (
        "share of the links' attainable rate that the library's collectives get",
        {"": (0.96, "fitted: all_gather of 256 MiB between two H200, 356 of 369 GB/s, " + _H200)},
    ),
    "partitioned_bytes_per_s": (
        "the same where a program writes to one rank",
        {"": (22e9, "measured: all_gather by partitioned with 16 programs, 347 GB/s, " + _H200)},
    ),
    "copy_engine_start": (
        "time of a small all_gather by copy_engine, in times of collective_s",
        {
            "": (
                3.7,
                "assumed: as copies between two barriers, 17 to 24 us up to 256 KiB on two H200, docs/performance.md",
            )
        },
    ),
    "copy_engine_link": (
        "collective_link of all_gather by copy_engine",
        {
            "": (
                1.05,
                "assumed: as copies without meetings, 387 to 395 of 369 GB/s on two H200, docs/performance.md",
            ),
            "gfx": (1.0, "assumed: the figures of the links are what copies reach"),
        },
    ),
    "push_start": (
        "time of a small all_reduce by push, in times of collective_s",
        {"": (0.78, "measured: 4.5 us for 4 KiB between two H200, " + _H200)},
    ),
    "one_shot_start": (
        "time of a small all_reduce by one_shot, in times of collective_s",
        {"": (1.1, "measured: 6.4 us for 4 KiB between two H200, " + _H200)},
    ),
    "two_shot_start": (
        "time of a small all_reduce by two_shot, in times of collective_s",
        {"": (1.14, "measured: 6.6 us for 4 KiB between two H200, " + _H200)},
    ),
    "ring_start": (
        "time of a small all_reduce by ring, in times of collective_s",
        {"": (1.36, "measured: 7.9 us for 4 KiB between two H200, " + _H200)},
    ),
    "atomic_start": (
        "time of a small all_reduce by atomic, in times of collective_s",
        {"": (1.6, "measured: 9.2 us for 4 KiB between two H200, " + _H200)},
    ),
    "spinlock_start": (
        "time of a small all_reduce by spinlock, in times of collective_s",
        {"": (2.35, "measured: 13.6 us for 4 KiB between two H200, " + _H200)},
    ),
    "one_shot_link": (
        "collective_link of all_reduce by one_shot",
        {"": (0.94, "fitted: 16 to 256 MiB between two H200, 346 of 369 GB/s, " + _H200)},
    ),
    "push_link": (
        "collective_link of all_reduce by push",
        {"": (0.43, "fitted: 16 to 256 MiB between two H200, 151 to 163 of 369 GB/s, " + _H200)},
    ),
    "ring_link": (
        "collective_link of all_reduce by ring",
        {"": (0.23, "fitted: 16 to 256 MiB between two H200, 83 to 89 of 369 GB/s, " + _H200)},
    ),
    "atomic_link": (
        "collective_link of all_reduce by atomic",
        {"": (0.25, "fitted: 16 to 256 MiB between two H200, 92 to 97 of 369 GB/s, " + _H200)},
    ),
    "spinlock_link": (
        "collective_link of all_reduce by spinlock",
        {"": (0.16, "fitted: 16 to 256 MiB between two H200, 58 to 60 of 369 GB/s, " + _H200)},
    ),
    "push_slot_bytes": (
        "bytes that push sends at once",
        {"": (512e3, "fitted: 5.6 us for 256 KiB and 29 us for 1 MiB, " + _H200)},
    ),
    "push_turns_s": (
        "what push takes beyond, for waiting until slots are free, s",
        {"": (2e-5, "fitted: the same rows, " + _H200)},
    ),
}


class Calibration(NamedTuple):
    """The values for one machine, named as in :data:`FIGURES`."""

    kernel_efficiency: float
    vendor_efficiency: float
    vendor_load: float
    vendor_link: float
    vendor_reduce_link: float
    vendor_graph_link: float
    vendor_most_bytes_per_s: float
    vendor_collective_s: float
    vendor_ramp_bytes: float
    side_by_side: float
    kernel_s: float
    fused_s: float
    two_shot_meeting: float
    one_shot_meeting: float
    copies_s: float
    staged_loop: float
    fetch_bytes_per_s: float
    fetch_piece_s: float
    pull_bytes_per_s: float
    send_bytes_per_s: float
    add_bytes_per_s: float
    rounds_exposed: float
    rounds_in_step: float
    collective_s: float
    collective_bytes_per_s: float
    collective_link: float
    partitioned_bytes_per_s: float
    copy_engine_start: float
    copy_engine_link: float
    push_start: float
    one_shot_start: float
    two_shot_start: float
    ring_start: float
    atomic_start: float
    spinlock_start: float
    one_shot_link: float
    push_link: float
    ring_link: float
    atomic_link: float
    spinlock_link: float
    push_slot_bytes: float
    push_turns_s: float


@cache
def calibration(machine: str, family: str) -> Calibration:
    """The values for a machine: its own, else its family's, else those for everything else."""
    return Calibration(**values_for(FIGURES, machine, family))


def values_for(figures: Figures, machine: str, family: str) -> dict[str, float]:
    """Of each figure the value for a machine: its own, else its family's, else that for everything else."""
    values = {}
    for name, (_, places) in figures.items():
        place = next(place for place in (machine, family, "") if place in places)
        values[name] = places[place][0]
    return values
