"""What collect_tuned.py times and derive_tuned.py reads: layers of models, and variations of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from iris._target import KNOWN
from iris.ops.arguments import Problem
from iris.ops.choice import Bringing, staged, tiles_for, wide_tiles
from iris.ops.config import FusedConfig, HbmBufferConfig


@dataclass(frozen=True)
class Layer:
    """A matrix product of a model, before it is split over ranks.

    Attributes:
        size: N and K of the whole product.
        columns: whether the ranks divide N, and gather A; else they divide K, and add what they get.
    """

    size: tuple[int, int]
    columns: bool = True

    def of_rank(self, world: int) -> tuple[int, int]:
        """N and K of a rank where the ranks divide N."""
        return (self.size[0] // world if self.columns else self.size[0]), self.size[1]


# Layers before which A is gathered. Query, key and value together; gate and up together.
GATHERED = {
    "n3584_k8192": Layer((3584, 8192), columns=False),  # the same of every rank, whatever their number
    "llama_7b_qkv": Layer((12288, 4096)),
    "llama_7b_gate_up": Layer((22016, 4096)),
    "llama_13b_qkv": Layer((15360, 5120)),
    "llama_13b_gate_up": Layer((27648, 5120)),
    "llama_70b_qkv": Layer((10240, 8192)),
    "llama_70b_gate_up": Layer((57344, 8192)),
    "mixtral_qkv": Layer((6144, 4096)),
    "mixtral_gate_up": Layer((28672, 4096)),
}
# Layers whose products are added over the ranks.
REDUCED = {
    "n3584_k8192": Layer((3584, 8192), columns=False),
    "llama_7b_out": Layer((4096, 4096), columns=False),
    "llama_7b_down": Layer((4096, 11008), columns=False),
    "llama_13b_down": Layer((5120, 13824), columns=False),
    "llama_70b_out": Layer((8192, 8192), columns=False),
    "llama_70b_down": Layer((8192, 28672), columns=False),
    "mixtral_down": Layer((4096, 14336), columns=False),
}


def variations(ctx: Any, operation: str, shape: Any, asked: list[int] | None = None) -> list[tuple[str, FusedConfig]]:
    """Algorithms and configurations: the library's own without tables first, then that with one thing changed.

    Where A is gathered all begin with the wide tiles, also for few rows, for which the library takes narrower ones.

    ``asked``: which of ``STAGED_CHANGES``; None for all.
    """
    world = ctx.get_num_ranks()
    if operation == "all_gather_matmul":
        problem = _gathered(ctx, shape)
        chosen = STAGED_CHANGES if asked is None else [STAGED_CHANGES[number] for number in asked]
        configs = [varied(ctx, problem, changes) for changes in chosen]
        found = [("hbm_buffer", config) for config in configs if config is not None]
    else:
        dtypes = (shape.dtype,) * 3
        problem = Problem(shape.M, shape.N, shape.K // world, *dtypes, world, None, None, "NN")
        found = []
        scatter = operation == "matmul_reduce_scatter"
        rows, owners = (-(-shape.M // world), world) if scatter else (shape.M, 1)
        usual = tiles_for(ctx, problem, rows, owners)
        for algorithm in ("fused",) if scatter else ("two_shot", "one_shot"):
            for changes in REDUCED_CHANGES:
                config = replace(usual, **changes)
                if not scatter:
                    config = replace(config, all_reduce_variant=algorithm)
                if fits(ctx, config, shape.dtype.itemsize):
                    found.append((algorithm, config))
    return [one for place, one in enumerate(found) if one not in found[:place]]


def copies(ctx: Any, shape: Any) -> list[tuple[str, HbmBufferConfig]]:
    """Configurations of all_gather_matmul whose shards the copy engines bring; for ranks with GPUs of their own."""
    found = [varied(ctx, _gathered(ctx, shape), changes, "copy_engine") for changes in COPIED_CHANGES]
    configs = [config for config in found if config is not None]
    return [("copy_engine", config) for config in dict.fromkeys(configs)]


def _gathered(ctx: Any, shape: Any) -> Problem:
    dtypes = (shape.dtype,) * 3
    return Problem(shape.M, shape.N, shape.K, *dtypes, ctx.get_num_ranks(), shape.gather_dim, None, "NN")


_TILE = ("block_size_m", "block_size_n", "block_size_k", "num_stages", "num_warps")
# One thing at a time: fields of the tiles, and of iris.ops.choice.Bringing.
STAGED_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"fetchers": 28},
    {"stage": 0.5},
    {"flag_bytes": 128 << 10},
    {"flag_bytes": 64 << 10},
    {"fetchers": 28, "flag_bytes": 64 << 10},
    {"num_stages": 3},
    {"stage": 0.25},
    {"stage": 0.5, "fetchers": 28},
    {"stage": 0.5, "flag_bytes": 64 << 10},
    {"stage": 0.25, "flag_bytes": 64 << 10},
)
# No programs fetch then.
COPIED_CHANGES: tuple[dict[str, Any], ...] = ({}, {"stage": 0.5}, {"stage": 0.25}, {"flag_bytes": 128 << 10})
REDUCED_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"group_size_m": 16},
    dict(zip(_TILE, (256, 128, 64, 4, 8), strict=True)),
    dict(zip(_TILE, (128, 128, 64, 4, 8), strict=True)),
    dict(zip(_TILE, (64, 128, 128, 4, 8), strict=True)),
)


def varied(
    ctx: Any, problem: Problem, changes: dict[str, Any], algorithm: str = "hbm_buffer"
) -> HbmBufferConfig | None:
    """The library's configuration with a staging buffer and wide tiles, changed; None where that does not fit."""
    bringing = {field.name: changes[field.name] for field in fields(Bringing) if field.name in changes}
    usual = wide_tiles(ctx, problem)
    tiles = replace(usual, **{name: value for name, value in changes.items() if name not in bringing})
    if not fits(ctx, tiles, problem.a_dtype.itemsize):
        return None
    return staged(ctx, problem, algorithm, tiles, Bringing(**bringing))


def fits(ctx: Any, config: FusedConfig, itemsize: int) -> bool:
    """Whether the K loop has the shared memory that it takes."""
    return config.shared_memory_bytes(itemsize, itemsize) <= ctx.target.shared_memory_bytes


def name_of(algorithm: str, config: FusedConfig) -> str:
    """The algorithm, and the fields that are not at their default."""
    usual = type(config)()
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return " ".join([algorithm, *(f"{name}={v}" for name, v in given.items() if v != getattr(usual, name))])


def of_name(name: str) -> tuple[str, dict[str, Any]]:
    """The algorithm and the fields that :func:`name_of` was given."""
    algorithm, *words = name.split(" ")
    params: dict[str, Any] = {}
    for field, _, value in (word.partition("=") for word in words):
        params[field] = int(value) if value.lstrip("-").isdigit() else value
    return algorithm, params


def variant_of(world: int, gather_dim: int, sizes: dict[str, int], params: dict[str, Any]) -> int | None:
    """Which of ``STAGED_CHANGES`` gives these parameters on an H200 of which a rank has all; None when none does.

    The first of those that come to the same.
    """
    variants = _variants(world, gather_dim, tuple(sizes[name] for name in "MNK"))
    return variants.index(params) if params in variants else None


@cache
def _variants(world: int, gather_dim: int, sizes: tuple[int, int, int]) -> list[dict[str, Any] | None]:
    place = SimpleNamespace(target=KNOWN["h200"], get_cu_count=lambda: KNOWN["h200"].compute_units)
    problem = Problem(*sizes, *(torch.bfloat16,) * 3, world, gather_dim, None, "NN")
    configs = [varied(place, problem, changes) for changes in STAGED_CHANGES]
    return [None if config is None else of_name(name_of("hbm_buffer", config))[1] for config in configs]
