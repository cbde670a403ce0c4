"""What tests of all_gather_matmul share: configurations, problems, and how results and errors are looked at."""

from dataclasses import replace

import pytest
import torch

from iris.errors import UnsupportedError
from iris.ops import FusedConfig
from iris.ops.config import HbmBufferConfig
from iris.testing.numeric import assert_bitwise_equal, assert_close, random_tensor
from iris.testing.reference import all_gather_matmul as reference

SMALL = FusedConfig(32, 32, 32, group_size_m=2, num_warps=4)
# Few programs: an interpreted program costs time even when it finds nothing to do.
FETCHED = HbmBufferConfig(
    32, 32, 32, group_size_m=2, num_warps=4, k_per_flag=2, num_fetch_sms=2, num_fetch_stages=2,
    first_stage_fetch_sms=3, num_sms=5,
)  # fmt: skip
# So many stages that tiles overlap.
COPIED = replace(FETCHED, transport="copy_engine", num_stages=3)
ALGORITHMS = {
    "auto": {},
    "pull": {"algorithm": "pull", "config": SMALL},
    "torch": {"algorithm": "torch"},
    "hbm_buffer": {"algorithm": "hbm_buffer", "config": FETCHED},
    "copy_engine": {"algorithm": "copy_engine", "config": COPIED},
}
STAGED = ("hbm_buffer", "copy_engine")
# The whole matrix for every algorithm; the interpreter takes minutes for those with a staging buffer, so of these the
# default run has selections only: the tests named "staged".
SLOW = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(400)]) for name in STAGED]
staged_parameter = pytest.mark.parametrize("algorithm", STAGED)


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(400)])


def shard_shape(M, K, world, gather_dim):
    return (M, K // world) if gather_dim == 1 else (M // world, K)


def laid_out(tensor, letter):
    """The same values, with contiguous rows (N) or columns (T)."""
    return tensor if letter == "N" else tensor.t().contiguous().t()


def problem(ctx, M, N, K, dtype, *, gather_dim=1, transpose="NN", out_dtype=None, integers=False, seed=0, b_dtype=None):
    """(out full of NaN, own shard on the heap, B, every rank's shard)."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    shape = shard_shape(M, K, world, gather_dim)
    shards = [random_tensor(shape, dtype, seed=seed, rank=r, integers=integers) for r in range(world)]
    b = random_tensor((K, N), b_dtype or dtype, seed=seed + 1, rank=0, integers=integers)
    mine = shards[rank].to(device)
    # A column-major shard is a transposed view of a tensor on the heap.
    on_heap = ctx.as_symmetric(mine) if transpose[0] == "N" else ctx.as_symmetric(mine.t().contiguous()).t()
    kind = out_dtype or {torch.int8: torch.int32}.get(dtype, torch.float16 if dtype.itemsize == 1 else dtype)
    out = torch.full((M, N), float("nan") if kind.is_floating_point else -99, dtype=kind, device=device)
    return out, on_heap, laid_out(b.to(device), transpose[1]), shards, b


def assert_same(actual, expected):
    """Equal values of equal dtype; a zero may have either sign, which depends on the order of a sum."""
    assert_bitwise_equal(actual + 0, expected + 0)


def check(ctx, out, shards, b, bias=None, gather_dim=1, integers=False):
    ctx.synchronize()
    want = reference(shards, b, bias, gather_dim)
    if integers:
        assert_same(out.cpu().to(torch.float64), want)
    else:
        assert_close(out.cpu(), want, shards[0].dtype, k=b.shape[0])


def expect(kind, *parts):
    def verify(call):
        with pytest.raises(kind) as caught:
            call()
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    return verify


def refuse_strided(ctx, out, a, b, gather_dim=1):
    """Copies bring rows that lie together and nothing else."""
    strides = str(tuple(a.stride()))
    expect(UnsupportedError, "copy engine", strides, "A_sharded.contiguous()", "transport='sm'")(
        lambda: ctx.ops.all_gather_matmul(out, a, b, gather_dim=gather_dim, **ALGORITHMS["copy_engine"])
    )
    assert out.isnan().all()
