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


STAGED_LAYOUTS = ("k_contiguous", "m_contiguous")
TRANSPORTS = ("sm", "copy_engine")


@dataclass(frozen=True)
class HbmBufferConfig(FusedConfig):
    """How the kernel with a staging buffer runs: a :class:`FusedConfig` and how the peers' shards are fetched.

    Attributes:
        k_per_flag: blocks of K that are fetched in one piece and announced by one flag; need not divide anything.
        num_fetch_sms: programs that fetch until all has come; at most as many as there are programs.
        num_fetch_stages: parts of the rows that are fetched one after the other.
        first_stage_fetch_sms: programs that fetch the first stage; those beyond ``num_fetch_sms`` then multiply.
        staged_a_layout: ``"k_contiguous"`` (rows of A lie together) or ``"m_contiguous"`` (columns do).
        transport: who brings the peers' shards: ``"sm"``, programs of the kernel, or ``"copy_engine"``, copies on
            further streams that set a flag each; all programs multiply then, one flag stands for all K of a peer in a
            stage, and the fields about fetchers and ``k_per_flag`` mean nothing.
    """

    k_per_flag: int = 8
    num_fetch_sms: int = 32
    num_fetch_stages: int = 1
    first_stage_fetch_sms: int = 256
    staged_a_layout: str = "k_contiguous"
    transport: str = "sm"

    def __str__(self) -> str:
        if self.transport == "copy_engine":
            return f"{super().__str__()}, copies in {self.num_fetch_stages} stages"
        return (
            f"{super().__str__()}, {self.k_per_flag} blocks a flag, {self.num_fetch_sms} fetchers "
            f"({self.first_stage_fetch_sms} for the first of {self.num_fetch_stages} stages), {self.staged_a_layout}"
        )

    def validate(self, world_size: int | None = None) -> None:
        """As :meth:`FusedConfig.validate`, and the fields of this class."""
        super().validate(world_size)
        for name in ("k_per_flag", "num_fetch_sms", "num_fetch_stages"):
            if getattr(self, name) <= 0:
                raise ArgumentError(f"HbmBufferConfig.{name} must be above 0, got {getattr(self, name)}")
        if self.first_stage_fetch_sms < 0:
            raise ArgumentError(
                f"HbmBufferConfig.first_stage_fetch_sms must be at least 0, got {self.first_stage_fetch_sms}"
            )
        if self.staged_a_layout not in STAGED_LAYOUTS:
            raise ArgumentError(
                f"HbmBufferConfig.staged_a_layout must be one of {', '.join(STAGED_LAYOUTS)}, "
                f"got {self.staged_a_layout!r}"
            )
        if self.transport not in TRANSPORTS:
            raise ArgumentError(
                f"HbmBufferConfig.transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}"
            )
        if self.transport == "copy_engine" and self.staged_a_layout != "k_contiguous":
            raise ArgumentError(
                "HbmBufferConfig: copies bring rows as they lie, so transport 'copy_engine' takes staged_a_layout "
                f"'k_contiguous', got {self.staged_a_layout!r}"
            )
