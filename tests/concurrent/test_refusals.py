"""What is refused, on every rank and before any launch, and what the message says; numbers of programs; parts."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import iris
from iris._target import KNOWN
from iris.concurrent._call import Asked, Programs, _programs
from iris.concurrent._collectives import COLLECTIVES
from iris.errors import (
    ArgumentError,
    DeviceMismatch,
    IrisError,
    NotAMemberError,
    NotSymmetricError,
    RankMismatch,
    UnsupportedError,
)
from iris.runtime.checks import check_product_dtypes
from iris.runtime.groups import Group


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def expect(kind, *parts):
    def verify(function):
        with pytest.raises(kind) as caught:
            function()
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    return verify


def body_refusals(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    a, b = torch.ones(20, 16, device=device), torch.ones(16, 24, device=device)
    src, dst = ctx.ones(4 * world, 6), ctx.zeros(4 * world, 6)
    op, x = ctx.concurrent, SimpleNamespace(**{name: getattr(ctx.concurrent, name) for name in COLLECTIVES})

    def t(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    # The product.
    expect(ArgumentError, "A must be (M, K)", "(20, 16)", "(17, 24)")(lambda: x.all_reduce(a, t(17, 24), src))
    expect(ArgumentError, "A must have two dimensions", "(16,)")(lambda: x.all_reduce(a[0], b, src))
    expect(ArgumentError, "B must be a tensor, got str")(lambda: x.all_reduce(a, "b", src))
    expect(ArgumentError, "one dtype", "float16")(lambda: x.all_reduce(a.half(), b, src))
    expect(ArgumentError, "float32, float16, bfloat16, int8 or fp8", "float64")(
        lambda: x.all_reduce(a.double(), b.double(), src)
    )
    expect(ArgumentError, "C must have shape (20, 24)", "(24, 20)")(lambda: x.all_reduce(a, b, src, C=t(24, 20)))
    expect(ArgumentError, "C may be float32, float16, bfloat16", "int32")(
        lambda: x.all_reduce(a, b, src, C=t(20, 24, dtype=torch.int32))
    )
    expect(ArgumentError, "C is written", "expanded")(lambda: x.all_reduce(a, b, src, C=t(1, 24).expand(20, 24)))
    expect(DeviceMismatch, "A is on meta")(lambda: x.all_reduce(a.to("meta"), b, src))
    # The collective.
    expect(ArgumentError, "comm_src must have two dimensions")(lambda: x.all_gather(a, b, src[0]))
    expect(ArgumentError, "comm_dst must have shape", str((4 * world, 6)), "(3, 6)")(
        lambda: x.all_reduce(a, b, src, comm_dst=dst[:3])
    )
    expect(ArgumentError, "comm_dst must have shape (4, 6)")(lambda: x.reduce_scatter(a, b, src, comm_dst=t(5, 6)))
    expect(ArgumentError, "comm_dst must have shape")(lambda: x.all_to_all(a, b, src, comm_dst=t(4 * world, 7)))
    expect(ArgumentError, "torch.chunk cuts them", f"comm_dst's {4 * world}", "got 5")(
        lambda: x.all_gather(a, b, t(5, 6), comm_dst=dst)
    )
    expect(ArgumentError, "dtype of comm_src", "float32", "float16")(
        lambda: x.broadcast(a, b, src, comm_dst=dst.half())
    )
    expect(ArgumentError, "all_reduce adds", "int16", "comm_src is torch.bool")(lambda: x.all_reduce(a, b, src.bool()))
    expect(ArgumentError, "complex128", "view_as_real")(lambda: x.broadcast(a, b, t(2, 2, dtype=torch.complex128)))
    expect(ArgumentError, "root must be one of the ranks", f"got {world}")(lambda: x.broadcast(a, b, src, root=world))
    if world > 1:
        for name in ("all_reduce", "reduce_scatter", "all_to_all"):
            expect(NotSymmetricError, "comm_src is read by the other ranks")(
                lambda name=name: getattr(op, name)(a, b, t(4 * world, 6))
            )
        expect(NotSymmetricError, "comm_dst is written by the other ranks")(
            lambda: x.all_gather(a, b, t(4, 6), comm_dst=t(4 * world, 6))
        )
        expect(NotAMemberError, "not a member")(
            lambda: x.all_reduce(a, b, src, group=[1 - min(ctx.get_rank(), 1)] if ctx.get_rank() < 2 else [0])
        )
    # Memory that is in use at one time.
    expect(ArgumentError, "C overlaps A")(lambda: x.all_reduce(a, t(16, 16), src, C=a))
    whole = ctx.zeros(4 * world + 1, 6)
    expect(ArgumentError, "comm_dst overlaps comm_src")(lambda: x.all_reduce(a, b, whole[1:], comm_dst=whole[:-1]))
    expect(ArgumentError, "comm_dst overlaps comm_src")(lambda: x.broadcast(a, b, src, comm_dst=src))
    square = ctx.zeros(20, 24)
    expect(ArgumentError, "C overlaps comm_dst")(lambda: x.broadcast(a, b, t(20, 24), C=square, comm_dst=square))
    expect(ArgumentError, "C overlaps comm_src")(lambda: x.all_reduce(a, b, square, C=square, comm_dst=square))
    # How.
    for name, value, parts in (
        ("mode", "both", ("'fused', 'concurrent'", "'both'")),
        ("mode", ["fused"], ("'fused', 'concurrent'",)),
        ("num_wgs", 0, ("at least 1", "0")),
        ("num_wgs", 2.5, ("an int",)),
        ("gemm_wgs", -1, ("at least 0", "-1")),
        ("comm_cap", 0, ("at least 1",)),
        ("gemm_block", (64, 64), ("3 powers of two of at least 16", "(64, 64)")),
        ("gemm_block", (64, 64, 8), ("of at least 16",)),
        ("gemm_block", [64, 96, 16], ("powers of two",)),
        ("comm_block", (3, 4), ("2 powers of two",)),
        ("comm_block", {}, ("2 powers of two",)),
        ("num_warps", 3, ("1, 2, 4, 8 or 16", "3")),
        ("num_stages", 0, ("at least 1",)),
        ("gemm_group_m", 0, ("at least 1",)),
        ("workspace", 3, ("make_workspace", "int")),
    ):  # fmt: skip
        expect(ArgumentError, name, *parts)(lambda name=name, value=value: x.all_reduce(a, b, src, **{name: value}))
    expect(ArgumentError, "gemm_wgs=5 do not divide num_wgs=4")(lambda: x.all_reduce(a, b, src, num_wgs=4, gemm_wgs=5))
    expect(ArgumentError, "comm_cap is for mode 'fused'")(
        lambda: x.all_reduce(a, b, src, mode="concurrent", comm_cap=2)
    )
    with pytest.raises(TypeError, match="gemm_wg"):
        x.reduce_scatter(a, b, src, gemm_wg=3)
    with pytest.raises(TypeError, match="root"):
        x.all_gather(a, b, src, root=0)
    # After every refusal the context and the operation still work, and nothing was written.
    assert (dst == 0).all()
    assert (square == 0).all()
    c, total = x.all_reduce(a, b, src, comm_dst=dst, num_wgs=2)
    ctx.synchronize()
    assert (c == 16).all()
    assert (total == world).all()
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_bad_arguments_are_refused_on_every_rank(ranks, world):
    ranks(world).run(body_refusals)


def test_dtypes_that_a_product_may_have():
    target, fp8 = KNOWN["h200"], torch.float8_e4m3fnuz
    with pytest.raises(UnsupportedError, match=r"A is float8_e4m3fnuz.*it does: float8_e4m3fn, float8_e5m2"):
        check_product_dtypes(target, fp8, fp8)
    assert check_product_dtypes(KNOWN["mi300x"], fp8, fp8)[0] == torch.bfloat16
    assert check_product_dtypes(target, torch.int8, torch.int8) == (torch.int32,)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        possible = check_product_dtypes(target, dtype, dtype)
        assert possible[0] == dtype
        assert len(set(possible)) == 3


def body_disagreement(ctx):
    """What one rank finds wrong, or has otherwise, all learn of before anything is launched."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a = torch.ones(16, 16, device=device)
    src, dst, other = ctx.ones(8, 6), ctx.zeros(8, 6), ctx.zeros(8, 6)
    op = ctx.concurrent.all_reduce
    with pytest.raises(IrisError) as caught:
        op(a, a[:8] if rank else a, src)
    if rank:
        assert isinstance(caught.value, ArgumentError)
    else:
        assert isinstance(caught.value, RankMismatch)
        assert "rank 1 raised ArgumentError: A must be (M, K)" in str(caught.value)
    with pytest.raises(RankMismatch, match=r"rows of the collective is 8 on rank 0, 7 on rank 1"):
        op(a, a, src[: 8 - min(rank, 1)])
    with pytest.raises(RankMismatch, match=r"offset of comm_dst in the heap"):
        op(a, a, src, comm_dst=other if rank else dst)
    with pytest.raises(RankMismatch, match=r"comm_dst is none on rank 0, given on rank 1"):
        op(a, a, src, comm_dst=dst if rank else None)
    with pytest.raises(RankMismatch, match=r"comm_block is \(16, 16\) on rank 0, \(32, 16\)"):
        op(a, a, src, comm_block=(32 if rank else 16, 16))
    with pytest.raises(RankMismatch, match=r"root is 0 on rank 0, 1 on rank 1"):
        ctx.concurrent.broadcast(a, a, src, root=min(rank, 1))
    workspace = ctx.concurrent.make_workspace()
    with pytest.raises(RankMismatch, match=r"flags is the context's on rank 0, \d+ on rank 1"):
        op(a, a, src, workspace=workspace if rank else None)
    # Rows of a gather may differ only as the output says.
    with pytest.raises(RankMismatch, match="rows of the collective"):
        ctx.concurrent.all_gather(a, a, src[: 8 - min(rank, 1)])
    _, total = op(a, a, src, comm_dst=dst)
    ctx.synchronize()
    assert (total == world).all()
    assert (other == 0).all()
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(3)])
def test_ranks_that_disagree_all_learn_of_it(ranks, world):
    ranks(world).run(body_disagreement)


def body_parts_of_the_world(ctx):
    pair = [0, 2]
    if ctx.get_rank() in pair:
        a, src = torch.ones(16, 16), torch.ones(4, 4)
        with pytest.raises(ArgumentError, match=r"all 3 ranks allocate together, and only 2 of them call"):
            ctx.concurrent.all_gather(a, a, src, group=pair)
    ctx.barrier()


def test_a_group_brings_its_own_output(sim):
    sim.run(body_parts_of_the_world, 3)


CASES = [
    # asked, mode, products, items -> multiplying, exchanging, cap; of 8 compute units
    ({}, "fused", 100, 100, (6, 2, 8)),
    ({"num_wgs": 12}, "fused", 100, 100, (9, 3, 12)),
    ({"gemm_wgs": 0}, "fused", 100, 100, (0, 8, 8)),
    ({"gemm_wgs": 8}, "fused", 100, 100, (8, 0, 8)),
    ({"comm_wgs": 3}, "fused", 100, 100, (5, 3, 8)),
    ({"gemm_wgs": 5, "comm_wgs": 6}, "fused", 100, 100, (5, 6, 11)),
    ({"gemm_wgs": 1, "num_wgs": 1, "comm_wgs": 0}, "fused", 100, 100, (1, 0, 1)),
    ({"comm_cap": 3}, "fused", 100, 100, (6, 2, 3)),
    ({}, "fused", 2, 1, (3, 0, 3)),
    ({}, "fused", 0, 0, (1, 0, 1)),
    ({}, "concurrent", 100, 100, (7, 1, 1)),
    ({"gemm_wgs": 4}, "concurrent", 100, 100, (4, 1, 1)),
    ({"num_wgs": 10, "gemm_wgs": 4}, "concurrent", 100, 100, (4, 6, 6)),
    ({"comm_wgs": 3}, "concurrent", 100, 100, (5, 3, 3)),
    ({"comm_wgs": 30}, "concurrent", 100, 100, (1, 30, 30)),
    ({"comm_wgs": 3}, "concurrent", 2, 0, (2, 1, 3)),
]


@pytest.mark.parametrize(("asked", "mode", "products", "items", "wanted"), CASES)
def test_programs(asked, mode, products, items, wanted):
    ctx = SimpleNamespace(get_cu_count=lambda: 8)
    assert _programs(ctx, Asked(**asked), mode, products, items, "all_gather", 2) == Programs(*wanted)


@pytest.mark.parametrize(
    ("asked", "world", "cap"), [({}, 2, 4), ({"num_wgs": 3}, 2, 2), ({"comm_cap": 7}, 2, 7), ({}, 1, 8)]
)
def test_half_of_the_programs_come_to_an_all_reduce(asked, world, cap):
    ctx = SimpleNamespace(get_cu_count=lambda: 8)
    assert _programs(ctx, Asked(**asked), "fused", 100, 100, "all_reduce", world).cap == cap


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({"num_wgs": 8, "gemm_wgs": 4, "comm_wgs": 3}, "fused"),
        ({"gemm_wgs": 9}, "fused"),
        ({"comm_wgs": 9}, "fused"),
        ({"gemm_wgs": 0, "comm_wgs": 0}, "fused"),
        ({"num_wgs": 8, "gemm_wgs": 5, "comm_wgs": 4}, "concurrent"),
        ({"gemm_wgs": 0}, "concurrent"),
    ],
)
def test_programs_that_do_not_go_together(asked, mode):
    with pytest.raises(ArgumentError, match=r"num_wgs|gemm_wgs"):
        _programs(SimpleNamespace(get_cu_count=lambda: 8), Asked(**asked), mode, 100, 100, "all_gather", 2)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_parts_cover_everything_once(world):
    for rows in (0, 1, 2, 7, 8, 9, 64, 65):
        groups = [Group(tuple(range(world)), index) for index in range(world)]
        scattered = [COLLECTIVES["reduce_scatter"].part(rows, None, group, 0) for group in groups]
        assert [r for part in scattered for r in range(part.first, part.first + part.rows)] == list(range(rows))
        assert all(part.rows == part.dst_rows <= part.chunk for part in scattered)
        exchanged = [COLLECTIVES["all_to_all"].part(rows, None, group, 0) for group in groups]
        assert [(part.first, part.rows) for part in exchanged] == [(part.first, part.rows) for part in scattered]
        assert all(part.dst_rows == world * part.rows for part in exchanged)
        gathered = [
            COLLECTIVES["all_gather"].part(part.rows, rows, group, 0)
            for part, group in zip(scattered, groups, strict=True)
        ]
        assert [r for part in gathered for r in range(part.first, part.first + part.rows)] == list(range(rows))
        reduced = [COLLECTIVES["all_reduce"].part(rows, None, group, 0) for group in groups]
        for tiles in (0, 1, 5, 16):
            assert sum(part.items(tiles) for part in reduced) == tiles
        broadcast = [COLLECTIVES["broadcast"].part(rows, None, group, world - 1).items(5) for group in groups]
        assert broadcast == [0] * (world - 1) + [5]


def test_signatures_are_those_of_the_original():
    """Positional: the context and three tensors; everything else by name."""
    for name in COLLECTIVES:
        parameters = inspect.signature(getattr(iris.concurrent.gemm, name)).parameters
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == ["shmem", "A", "B", "comm_src"]
        assert set(parameters) - set(positional) >= {
            "C", "comm_dst", "mode", "num_wgs", "gemm_wgs", "comm_wgs", "gemm_block", "gemm_group_m", "comm_block",
            "comm_group_m", "num_stages", "num_warps",
        }  # fmt: skip
        assert ("root" in parameters) == (name == "broadcast")
        documented = inspect.getdoc(getattr(iris.concurrent.gemm, name))
        assert all(f"{word}" in documented for word in parameters), name
