"""The tensors of a case that is measured, what has to come out of them, and who makes the calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris.concurrent._call import COMM_GROUP_M, fitted_comm_block
from iris.concurrent._collectives import COLLECTIVES, Part
from iris.concurrent.tuning_data._alone import charge_of_peers, tiles_of_rank_0, workspace_alone
from iris.errors import OutputError

if TYPE_CHECKING:
    from iris.runtime.context import Iris

TOLERANCE = {"float16": 0.02, "bfloat16": 0.1, "float32": 0.002}
_ROWS = 64  # of the product that are computed in float64
_VALUES = 4  # inputs of a sum are whole numbers from -4 to 4, so that it is exact


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; ``comm_m`` and ``comm_n`` are those of ``comm_src``."""

    M: int
    N: int
    K: int
    comm_m: int
    comm_n: int

    def __str__(self) -> str:
        return "x".join(map(str, (self.M, self.N, self.K, self.comm_m, self.comm_n)))

    @property
    def sizes(self) -> dict[str, int]:
        return {"M": self.M, "N": self.N, "K": self.K, "comm_m": self.comm_m, "comm_n": self.comm_n}

    @property
    def asked(self) -> dict[str, int]:
        """As :mod:`iris.concurrent.predictor` has them."""
        product = {"gemm_m": self.M, "gemm_n": self.N, "gemm_k": self.K}
        return product | {"comm_m": self.comm_m, "comm_n": self.comm_n}


class Operands:
    """The tensors of one case on a rank, on which the operation is called. Made by all ranks.

    With ``alone`` rank 0 alone is to call: its flags are set as if its peers had made every call already, so that it
    waits for none. Other ranks have tensors that it reads and writes, and do nothing.

    Attributes:
        name, shape, alone: of the case.
    """

    def __init__(self, ctx: Iris, name: str, shape: Shape, dtype: str, mode: str, seed: int, alone: bool = False):
        self.name, self.shape, self.alone = name, shape, alone
        self._ctx, self._mode, self._dtype = ctx, mode, dtype
        self._world, self._device = ctx.get_num_ranks(), ctx.get_device()
        self._seed = 1009 * seed
        rank, kind = ctx.get_rank(), getattr(torch, dtype)
        a = torch.randn(shape.M, shape.K, generator=self._generator(500 + rank), device=self._device).to(kind)
        b = torch.randn(shape.K, shape.N, generator=self._generator(900), device=self._device) * shape.K**-0.5
        self._a, self._b = a, b.to(kind)
        self._c = torch.empty(shape.M, shape.N, dtype=kind, device=self._device)
        part = COLLECTIVES[name].part(shape.comm_m, None, ctx.resolve_group(None), 0)
        # As many rows on every rank, whatever it has of them.
        rows = {"all_gather": part.whole, "reduce_scatter": part.chunk, "all_to_all": part.chunk * self._world}
        wanted = (rows.get(name, shape.comm_m), shape.comm_n)
        self._src, dst = (ctx.empty(*size, dtype=kind) for size in ((shape.comm_m, shape.comm_n), wanted))
        self._src.copy_(self._source(rank))
        self._dst = dst[: part.dst_rows]
        self._picked = torch.linspace(0, shape.M - 1, min(shape.M, _ROWS), device=self._device).long()
        self._product = self._a[self._picked].double() @ self._b.double()
        self._moved = self._expected(part, rank).to(kind)
        self._workspace = workspace_alone(ctx) if alone else None
        self._before = charge_of_peers(name, self._src.nbytes, self._world) if alone else lambda: None
        self._spoil()

    def call(self, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the call, with further arguments."""
        self._before()
        how |= {"C": self._c, "comm_dst": self._dst, "mode": self._mode, "workspace": self._workspace}
        return getattr(self._ctx.concurrent, self.name)(self._a, self._b, self._src, **how)

    def check(self) -> None:
        """Check what a call left behind, and overwrite it. All who call do.

        Raises:
            OutputError: what is wrong.
        """
        self._ctx.synchronize()
        found = self._c[self._picked].double()
        bad = (found - self._product).abs() > TOLERANCE[self._dtype] * (1 + self._product.abs())
        if bad.any() or self._c.isnan().any():
            raise OutputError(f"the product is wrong: {int(bad.sum())} of {bad.numel()} elements")
        for peer in self._checked():
            # What nobody writes has to stay NaN, which is not equal to itself.
            output = self._output(peer)
            wrong = (output != self._moved) & ~(output.isnan() & self._moved.isnan())
            if wrong.any():
                where = f" on rank {peer}" if self.alone else ""
                raise OutputError(f"the {self.name} is wrong{where}: {int(wrong.sum())} of {wrong.numel()} elements")
        self._spoil()

    def _spoil(self) -> None:
        """Fill the outputs, before any rank may write one."""
        self._c.fill_(math.nan)
        for peer in self._checked():
            self._output(peer).fill_(math.nan)
        self._ctx.synchronize()
        if not self.alone:
            self._ctx.exchange.all_gather("collect: outputs are filled", None)

    def _checked(self) -> tuple[int, ...]:
        """The ranks whose outputs this rank checks: its own, or all that rank 0 has written."""
        if not self.alone:
            return (self._ctx.get_rank(),)
        if self._ctx.get_rank():
            return ()
        return tuple(range(self._world)) if COLLECTIVES[self.name].writes_peers else (0,)

    def _output(self, peer: int) -> torch.Tensor:
        """The output of a rank of this process, or the own one."""
        own = self._dst
        if peer == self._ctx.get_rank() or not own.numel():
            return own
        return self._ctx.heap.on_peer(own, peer)

    def _generator(self, of: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed + of)

    def _source(self, of: int) -> torch.Tensor:
        size = (self.shape.comm_m, self.shape.comm_n)
        drawn = torch.randint(-_VALUES, _VALUES + 1, size, generator=self._generator(of), device=self._device)
        return drawn.to(getattr(torch, self._dtype))

    def _expected(self, part: Part, rank: int) -> torch.Tensor:
        """The collective's result on a rank, from what all ranks have; NaN where rank 0 alone writes nothing."""
        if self.name == "broadcast":
            return self._source(0)
        if self.name == "all_gather":
            nothing = torch.full((self.shape.comm_m, self.shape.comm_n), math.nan, device=self._device)
            return torch.cat([nothing if self.alone and peer else self._source(peer) for peer in range(self._world)])
        if self.name == "all_to_all":
            first = rank * part.chunk
            return torch.cat([self._source(peer)[first : first + part.chunk] for peer in range(self._world)])
        total = self._source(0).float()  # exact: the sums are small whole numbers
        for peer in range(1, self._world):
            total += self._source(peer)
        if self.name == "reduce_scatter":
            return total[part.first : part.first + part.dst_rows]
        return total.masked_fill(~self._own_tiles(part), math.nan) if self.alone else total

    def _own_tiles(self, part: Part) -> torch.Tensor:
        """Where the tiles of an all-reduce are that rank 0 adds."""
        block = fitted_comm_block(self._ctx, self.name, self._world, part, self._src)
        own = tiles_of_rank_0(self.shape.comm_m, self.shape.comm_n, block, COMM_GROUP_M, self._world)
        return own.to(self._device)
