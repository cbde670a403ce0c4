"""``FusedConfig``: tile sizes and launch parameters of a fused operation."""

from __future__ import annotations

from dataclasses import dataclass

from iris.errors import ArgumentError

ALL_REDUCE_VARIANTS = ("atomic", "ring", "one_shot", "two_shot", "spinlock")


@dataclass(frozen=True)
class FusedConfig:
    """How a fused operation's kernel runs.

    Attributes:
        block_size_m, block_size_n, block_size_k: tile of the output and step along K; powers of two, at least 16.
        group_size_m: rows of tiles that neighbouring programs share.
        num_sms: programs to start; None for the rank's compute units.
        num_xcds, chunk_size: chiplets to spread programs over and their chunk; kept for programs that set them.
        cache_modifier_a, cache_modifier_b: kept for programs that set them.
        allow_tf32: whether float32 inputs may use tf32; None follows ``torch.get_float32_matmul_precision()``.
        all_reduce_variant, all_reduce_num_rings: for operations that reduce.
        num_warps, num_stages: launch options.
    """

    block_size_m: int = 256
    block_size_n: int = 64
    block_size_k: int = 64
    group_size_m: int = 1
    num_sms: int | None = None
    num_xcds: int = 1
    chunk_size: int = 1
    cache_modifier_a: str = ".ca"
    cache_modifier_b: str = ".ca"
    allow_tf32: bool | None = None
    all_reduce_variant: str = "two_shot"
    all_reduce_num_rings: int = 1
    num_warps: int = 8
    num_stages: int = 2

    def __str__(self) -> str:
        return (
            f"tile {self.block_size_m}x{self.block_size_n}x{self.block_size_k}, group of {self.group_size_m}, "
            f"{self.num_warps} warps, {self.num_stages} stages"
        )

    def validate(self, world_size: int | None = None) -> None:
        """Check what does not depend on shapes or the machine.

        Args:
            world_size: number of ranks; the ring divides a tile's columns among them.

        Raises:
            ArgumentError: names the field, its value and what is possible.
        """
        for name in ("block_size_m", "block_size_n", "block_size_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ArgumentError(f"FusedConfig.{name} must be a power of two of at least 16, got {value}")
        for name in ("group_size_m", "num_xcds", "chunk_size", "all_reduce_num_rings", "num_stages"):
            if getattr(self, name) <= 0:
                raise ArgumentError(f"FusedConfig.{name} must be above 0, got {getattr(self, name)}")
        if self.num_sms is not None and self.num_sms <= 0:
            raise ArgumentError(f"FusedConfig.num_sms must be None or above 0, got {self.num_sms}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ArgumentError(f"FusedConfig.num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        if self.all_reduce_variant not in ALL_REDUCE_VARIANTS:
            raise ArgumentError(
                f"FusedConfig.all_reduce_variant must be one of {', '.join(ALL_REDUCE_VARIANTS)}, "
                f"got {self.all_reduce_variant!r}"
            )
        if self.all_reduce_variant == "ring" and world_size is not None and self.block_size_n % world_size:
            raise ArgumentError(
                f"FusedConfig.block_size_n={self.block_size_n} must be a multiple of world_size={world_size} in a ring"
            )

    def shared_memory_bytes(self, a_bytes: int, b_bytes: int) -> int:
        """Shared memory that the pipelined K loop takes for operands of so many bytes an element."""
        stage = self.block_size_k * (self.block_size_m * a_bytes + self.block_size_n * b_bytes)
        return stage * max(1, self.num_stages)
