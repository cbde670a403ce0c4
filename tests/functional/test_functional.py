"""iris.functional: values, gradients against dense float64 ones and differences, torch.compile, errors.

Every rank can make every rank's inputs, so tests know what to expect without communication.
"""

import gc
import shutil

import pytest
import torch
import torch.distributed as dist

import iris
from iris import functional
from iris.errors import ArgumentError, IrisError, NotAMemberError, RankMismatch, UnsupportedError
from iris.testing import reference
from iris.testing.numeric import assert_bitwise_equal, random_tensor

M, N, K = 6, 5, 4


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(400)])


def rows_of(whole, rank, world):
    """Rows of a rank, by torch.chunk's rule."""
    chunk = -(-whole.shape[0] // world)
    return whole[rank * chunk : (rank + 1) * chunk]


# What each function computes, of every rank's x, w and bias: the results of all ranks.
def dense_gather_rows(x, w, bias):
    return [torch.cat(x) @ b + c for b, c in zip(w, bias, strict=True)]


def dense_gather_columns(x, w, bias):
    return [torch.cat(x, dim=1) @ b + c for b, c in zip(w, bias, strict=True)]


def dense_reduce(x, w, bias):
    total = sum(a @ b for a, b in zip(x, w, strict=True))
    return [total + c for c in bias]


def dense_scatter(x, w, bias):
    return [rows_of(whole, rank, len(x)) for rank, whole in enumerate(dense_reduce(x, w, bias))]


def dense_gather_result(x, w, bias):
    whole = torch.cat([a @ b + c for a, b, c in zip(x, w, bias, strict=True)])
    return [whole] * len(x)


# name: (function, its options, dense form, shape of x, rows of w and of the bias in a world of so many ranks, whether
# the bias must be the same everywhere)
PRODUCTS = {
    "gather_rows": (
        "all_gather_matmul", {"gather_dim": 0}, dense_gather_rows, (M, K), lambda w: K, lambda w: M * w, False
    ),
    "gather_columns": (
        "all_gather_matmul", {"gather_dim": 1}, dense_gather_columns, (M, K), lambda w: K * w, lambda w: M, False
    ),
    "reduce": ("matmul_all_reduce", {}, dense_reduce, (M, K), lambda w: K, lambda w: M, True),
    "scatter": ("matmul_reduce_scatter", {}, dense_scatter, (2 * M, K), lambda w: K, lambda w: 2 * M, True),
    # Rows that do not come out even, and ranks without any.
    "scatter_uneven": ("matmul_reduce_scatter", {}, dense_scatter, (5, K), lambda w: K, lambda w: 5, True),
    "gather_result": ("matmul_all_gather", {}, dense_gather_result, (M, K), lambda w: K, lambda w: M, False),
}  # fmt: skip


def inputs(name, world, dtype, bias="row", integers=False, seed=0):
    """Every rank's (x, w, bias), on the host."""
    _, _, _, x_shape, depth, bias_rows, same = PRODUCTS[name]
    shape = (N,) if bias == "row" else (bias_rows(world), 1 if bias == "column" else N)

    def make(shape, seed, rank):
        return random_tensor(shape, dtype, seed=seed, rank=rank, integers=integers)

    return [
        [make(x_shape, seed, r) for r in range(world)],
        [make((depth(world), N), seed + 1, r) for r in range(world)],
        [make(shape, seed + 2, 0 if same else r) for r in range(world)],
    ]


def function_of(name, handle, **given):
    called, options = PRODUCTS[name][:2]
    return lambda x, w, bias=None: getattr(functional, called)(x, w, bias, handle=handle, **options, **given)


def weights_like(outs, seed=9):
    """What makes a loss of results: random, of each rank its own."""
    return [random_tensor(tuple(out.shape), torch.float64, seed=seed, rank=r) for r, out in enumerate(outs)]


def dense_gradients(name, every):
    """Results of all ranks, weights, and the gradients of sum <weights, result> with respect to every tensor."""
    leaves = [[t.detach().to(torch.float64, copy=True).requires_grad_() for t in of] for of in every]
    outs = PRODUCTS[name][2](*leaves)
    weights = weights_like(outs)
    torch.stack([(w * out).sum() for w, out in zip(weights, outs, strict=True)]).sum().backward()
    # A rank without rows has a bias that nothing depends on.
    grads = [[t.grad if t.grad is not None else torch.zeros_like(t) for t in of] for of in leaves]
    return [out.detach() for out in outs], weights, grads


def body_values(ctx, names):
    """Integers through the kernels, bit by bit: results and gradients."""
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    handle = functional.handle(ctx)
    assert functional.handle(ctx) == handle
    cases = [(name, torch.float32, bias) for name in names for bias in names[name]]
    for number, (name, dtype, bias) in enumerate([*cases, (next(iter(names)), torch.bfloat16, "row")]):
        every = inputs(name, world, dtype, bias, integers=True, seed=number)
        outs, weights, grads = dense_gradients(name, every)
        x, w, c = (of[rank].to(device, copy=True).requires_grad_() for of in every)
        out = function_of(name, handle)(x, w, c)
        assert out.dtype == dtype
        if dtype == torch.float32:
            assert_bitwise_equal(out.detach().cpu() + 0, outs[rank].float() + 0)
            # An operation of another size in between uses the same memory of the heap.
            functional.all_gather(torch.ones(50, device=device), handle=handle)
            out.backward(weights[rank].float().to(device))
            for mine, want in zip((x, w, c), grads, strict=True):
                error = (mine.grad.cpu().double() - want[rank]).abs().max() / (1 + want[rank].abs().max())
                assert error < 1e-5, (name, bias, error)
        else:
            assert torch.allclose(out.detach().cpu().double(), outs[rank], rtol=2**-6, atol=2.0)
        # Without a bias.
        plain = PRODUCTS[name][2](*[[t.double() for t in of] for of in every[:2]], [0.0] * world)
        if dtype == torch.float32:
            assert_bitwise_equal(function_of(name, handle)(x, w).detach().cpu() + 0, plain[rank].float() + 0)
    ctx.barrier()


BIASES = dict.fromkeys(PRODUCTS, ("row",)) | {"scatter_uneven": ("column", "matrix"), "gather_result": ("matrix",)}
EVERY_BIAS = dict.fromkeys(PRODUCTS, ("row", "column", "matrix"))


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, BIASES),
        slow(1, EVERY_BIAS),
        slow(2, EVERY_BIAS),
        slow(3, EVERY_BIAS),
        slow(4, EVERY_BIAS),
    ],
)
def test_values_and_gradients_of_products(ranks, world, names):
    ranks(world).run(body_values, names, timeout=80)


def body_kernels(ctx):
    """In float32 the kernels of the library run, not PyTorch."""
    handle = functional.handle(ctx)
    called = []
    for operation in ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_gather"):
        before = getattr(ctx.ops, operation)

        def noting(*args, before=before, **given):
            workspace = before(*args, **given)
            called.append((workspace.plan.operation, workspace.plan.algorithm))
            return workspace

        setattr(ctx.ops, operation, noting)
    for name in PRODUCTS:
        every = inputs(name, ctx.get_num_ranks(), torch.float32)
        x, w, c = (of[ctx.get_rank()].to(ctx.get_device(), copy=True).requires_grad_() for of in every)
        function_of(name, handle)(x, w, c).sum().backward()
    for operation in ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_gather"):
        delattr(ctx.ops, operation)
    ctx.barrier()
    return called


def test_kernels_run(ranks):
    called = ranks(2).run(body_kernels)[0]
    scatter, gather = ("matmul_reduce_scatter", "fused"), ("all_gather_matmul", "pull")
    assert called == [
        gather, scatter, gather,
        gather, scatter, gather,
        ("matmul_all_reduce", "two_shot"),
        scatter, gather, gather,
        scatter, gather, gather,
        ("matmul_all_gather", "fused"),
    ]  # fmt: skip


def total_loss(ctx, out, weights):
    """The sum over ranks of <weights, result>."""
    return sum(ctx.exchange.all_gather("loss", float((weights * out.detach().cpu()).sum())))


def body_differences(ctx, names):
    """The gradients in float64 against central differences: one rank at a time changes one element, all ranks run."""
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    handle = functional.handle(ctx)
    step = 1e-5
    checked = 0
    for name in names:
        function = function_of(name, handle)
        x, w, c = (of[rank].to(device, copy=True).requires_grad_() for of in inputs(name, world, torch.float64))
        out = function(x, w, c)
        weights = random_tensor(tuple(out.shape), torch.float64, seed=3, rank=rank)
        (out * weights.to(device)).sum().backward()
        for who in range(world):
            for tensor in (x, w, c):
                values = tensor.detach().view(-1)
                for i in range(values.numel()):
                    losses = []
                    for sign in (1, -1):
                        before = values[i].item()
                        if rank == who:
                            values[i] += sign * step
                        losses.append(total_loss(ctx, function(x, w, c), weights))
                        values[i] = before
                    if rank == who:
                        slope = (losses[0] - losses[1]) / (2 * step)
                        assert abs(slope - tensor.grad.view(-1)[i].item()) < 1e-7 * (1 + abs(slope)), (name, who, i)
                        checked += 1
    ctx.barrier()
    return checked


@pytest.mark.parametrize("world", [2, slow(3)])
def test_gradients_are_those_of_the_sum_of_all_losses(ranks, world):
    names = list(PRODUCTS)
    counts = ranks(world).run(body_differences, names)
    for count in counts:
        assert count == sum(sum(of[0].numel() for of in inputs(name, world, torch.float64)) for name in names)


def body_gradcheck(ctx):
    handle = functional.handle(ctx)
    for name in PRODUCTS:
        for bias in ("row", "column"):
            every = [of[0].requires_grad_() for of in inputs(name, 1, torch.float64, bias)]
            assert torch.autograd.gradcheck(function_of(name, handle), every)
        # The gradients are made of operators that have gradients.
        assert torch.autograd.gradgradcheck(function_of(name, handle), every)
        x, w, _ = every
        assert torch.autograd.gradcheck(function_of(name, handle), (x.detach(), w))
        assert torch.autograd.gradcheck(function_of(name, handle), (x, w.detach()))
    matrix = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for call in COLLECTIVES.values():
        assert torch.autograd.gradcheck(lambda t, call=call: call(t, handle), (matrix,))


def test_gradcheck_of_one_rank(ranks):
    ranks(1).run(body_gradcheck)


# Functions of one tensor and a handle.
COLLECTIVES = {
    "all_gather": lambda t, h: functional.all_gather(t, handle=h),
    "all_gather_1": lambda t, h: functional.all_gather(t, handle=h, dim=1),
    "all_reduce": lambda t, h: functional.all_reduce(t, handle=h),
    "all_reduce_avg": lambda t, h: functional.all_reduce(t, handle=h, op="avg"),
    "reduce_scatter": lambda t, h: functional.reduce_scatter(t, handle=h),
    "reduce_scatter_avg": lambda t, h: functional.reduce_scatter(t, handle=h, op="avg"),
    "all_to_all": lambda t, h: functional.all_to_all(t, handle=h),
    "all_to_all_0": lambda t, h: functional.all_to_all(t, handle=h, dim=0),
    "broadcast": lambda t, h: functional.broadcast(t, handle=h, src=0),
}
DENSE = {
    "all_gather": lambda t: [torch.cat(t)] * len(t),
    "all_gather_1": lambda t: [torch.cat(t, 1)] * len(t),
    "all_reduce": lambda t: [sum(t)] * len(t),
    "all_reduce_avg": lambda t: [sum(t) / len(t)] * len(t),
    "reduce_scatter": lambda t: list(sum(t).chunk(len(t))),
    "reduce_scatter_avg": lambda t: list((sum(t) / len(t)).chunk(len(t))),
    "all_to_all": lambda t: [torch.cat([x.chunk(len(t), -1)[r] for x in t], -1) for r in range(len(t))],
    "all_to_all_0": lambda t: [torch.cat([x.chunk(len(t), 0)[r] for x in t], 0) for r in range(len(t))],
    "broadcast": lambda t: [t[0]] * len(t),
}


def body_collectives(ctx):
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    handle = functional.handle(ctx)
    for number, name in enumerate(COLLECTIVES):
        leaves = [
            random_tensor((2 * world, 3 * world), torch.float64, seed=number, rank=r).requires_grad_()
            for r in range(world)
        ]
        outs = DENSE[name](leaves)
        weights = weights_like(outs)
        sum((w * out).sum() for w, out in zip(weights, outs, strict=True)).backward()
        x = leaves[rank].detach().to(device, copy=True).requires_grad_()
        out = COLLECTIVES[name](x, handle)
        assert torch.allclose(out.detach().cpu(), outs[rank].detach(), rtol=1e-13, atol=1e-13), name
        (out * weights[rank].to(device)).sum().backward()
        want = leaves[rank].grad if leaves[rank].grad is not None else torch.zeros_like(leaves[rank])
        assert torch.allclose(x.grad.cpu(), want, rtol=1e-13, atol=1e-13), name
        assert not ctx.is_symmetric(out)
    # What has no gradient; a scalar; the other reductions.
    everyone = [random_tensor((4, 3), torch.float32, seed=50, rank=r) for r in range(world)]
    x = everyone[rank].to(device)
    for op in ("max", "min", "product"):
        got = functional.all_reduce(x, handle=handle, op=op)
        assert torch.allclose(got.cpu().double(), reference.all_reduce(everyone, op.upper()), rtol=1e-6)
    with pytest.raises(UnsupportedError, match=r"'max' has no gradient.*sum, avg"):
        functional.all_reduce(x.clone().requires_grad_(), handle=handle, op="max")
    scalar = torch.tensor(float(rank), requires_grad=True, device=device)
    gathered = functional.all_gather(scalar, handle=handle)
    assert gathered.tolist() == list(range(world))
    (gathered * torch.arange(1, world + 1, device=device)).sum().backward()
    assert scalar.grad.item() == world * (rank + 1)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_collectives(ranks, world):
    ranks(world).run(body_collectives)


def body_opcheck(ctx, names):
    """PyTorch's own checks of operators: schema, registration of gradients, shapes, what AOTAutograd makes of it."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    handle = functional.handle(ctx)
    for name in names:
        called, options = PRODUCTS[name][:2]
        x, w, c = (of[rank].requires_grad_() for of in inputs(name, world, torch.float64))
        arguments = (x, w, c, handle, *options.values(), None)
        torch.library.opcheck(getattr(torch.ops.iris, called).default, arguments)
    x = torch.randn(2 * world, 3 * world, dtype=torch.float64, requires_grad=True)
    for operation, last in (
        ("all_gather", 1), ("all_reduce", "sum"), ("reduce_scatter", "sum"), ("all_to_all", -1), ("broadcast", 0),
        ("sum_at", 0),
    ):  # fmt: skip
        torch.library.opcheck(getattr(torch.ops.iris, operation).default, (x, handle, last))
    ctx.barrier()


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["gather_columns", "scatter_uneven"]),
        slow(2, list(PRODUCTS)),
        slow(1, list(PRODUCTS)),
        slow(3, list(PRODUCTS)),
    ],
)
def test_opcheck(ranks, world, names):
    ranks(world).run(body_opcheck, names, timeout=80)


def body_compile(ctx, backend, dtype):
    """One graph of several functions with what lies between them, forward and backward, for two sizes."""
    rank, device = ctx.get_rank(), ctx.get_device()
    handle = functional.handle(ctx)

    def block(x, up, down, bias):
        hidden = torch.nn.functional.gelu(functional.all_gather_matmul(x, up, handle=handle, gather_dim=0))
        y = functional.matmul_reduce_scatter(hidden, down, bias, handle=handle)
        z = functional.matmul_all_gather(y, up, handle=handle) + functional.matmul_all_reduce(
            hidden, hidden.t() @ hidden, handle=handle
        )
        mean = functional.all_reduce(z.mean(), handle=handle, op="avg")
        pieces = functional.all_to_all(functional.all_gather(y, handle=handle), handle=handle, dim=0)
        first = functional.broadcast(functional.reduce_scatter(z, handle=handle), handle=handle)
        return z * mean, pieces.sin() * first.sum()

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for rows in (2, 6):
        leaves = [
            (0.3 * random_tensor(shape, dtype, seed=seed, rank=rank)).to(device).requires_grad_()
            for seed, shape in enumerate(((rows, K), (K, N), (N, K), (K,)))
        ]
        results = []
        for run in (block, compiled):
            outs = run(*leaves)
            loss = sum((out * torch.arange(out.numel(), device=device).view(out.shape)).sum() for out in outs)
            results.append([*outs, *torch.autograd.grad(loss, leaves)])
        tolerance = 1e-12 if dtype == torch.float64 else 2e-4
        for got, want in zip(results[1], results[0], strict=True):
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance * (1 + want.abs().max().item()))
        assert any(grad.abs().max() > 0 for grad in results[0][2:])
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(3)])
def test_compiled_with_gradients(ranks, world):
    ranks(world).run(body_compile, "aot_eager", torch.float32, timeout=80)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_by_inductor(ranks):
    if shutil.which("g++") is None:
        pytest.skip("the inductor backend needs a C++ compiler, and there is no g++")
    ranks(2).run(body_compile, "inductor", torch.float32, timeout=300)


def body_groups(ctx):
    """Two groups at once, of different sizes of problems, in an order that is not that of their ranks."""
    rank, device = ctx.get_rank(), ctx.get_device()
    pairs = [(3, 1), (0, 2)]
    mine = 0 if rank in pairs[0] else 1
    groups = [dist.new_group(list(pair)) for pair in pairs]
    members = dist.get_process_group_ranks(groups[mine])
    index, world = members.index(rank), 2
    handle = functional.handle(ctx, groups[mine])
    large = torch.ones(20, 20, device=device)
    with pytest.raises(ArgumentError, match=r"needs 1600 bytes.*alone.*heap_bytes=1600"):
        functional.reduce_scatter(large, handle=handle)
    assert functional.handle(ctx, groups[mine], heap_bytes=4096) == handle
    assert functional.reduce_scatter(large, handle=handle).eq(2).all()
    for name in PRODUCTS:
        every = inputs(name, world, torch.float64, seed=10 * mine)
        outs, weights, grads = dense_gradients(name, every)
        leaves = [of[index].to(device, copy=True).requires_grad_() for of in every]
        out = function_of(name, handle)(*leaves)
        assert torch.allclose(out.detach().cpu(), outs[index], rtol=1e-12, atol=1e-12)
        out.backward(weights[index].to(device))
        for leaf, want in zip(leaves, grads, strict=True):
            assert torch.allclose(leaf.grad.cpu(), want[index], rtol=1e-12, atol=1e-12), name
    with pytest.raises(NotAMemberError):
        functional.handle(ctx, groups[1 - mine])
    # A sequence of ranks: what the kernels do without the heap of others.
    listed = functional.handle(ctx, list(pairs[mine]))
    assert listed != handle
    assert functional.all_gather(torch.tensor([rank], device=device), handle=listed).tolist() == list(pairs[mine])
    with pytest.raises(UnsupportedError, match="sequence of ranks"):
        functional.matmul_reduce_scatter(large, large, handle=listed)
    ctx.barrier()


@pytest.mark.parametrize("world", [4])
def test_groups(ranks, world):
    ranks(world).run(body_groups)


def body_errors(ctx):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    handle = functional.handle(ctx)

    def t(*shape, **given):
        return torch.zeros(*shape, device=device, **given)

    # What PyTorch keeps on disk by the graph depends on the rank and the group.
    assert len(set(ctx.exchange.all_gather("handles", handle))) == world
    for wrong in ("iris:none", "", 3, None):
        with pytest.raises((ArgumentError, RuntimeError, TypeError), match=r"handle|str"):
            functional.all_reduce(t(3), handle=wrong)
    with pytest.raises(ArgumentError, match="number of bytes"):
        functional.handle(ctx, heap_bytes=-1)
    with pytest.raises(ArgumentError, match="x must have two dimensions"):
        functional.matmul_all_reduce(t(3), t(3, 3), handle=handle)
    with pytest.raises(ArgumentError, match=r"op must be one of sum.*'xor'"):
        functional.all_reduce(t(3), handle=handle, op="xor")
    with pytest.raises(ArgumentError, match="dim must be a dimension"):
        functional.all_gather(t(3), handle=handle, dim=1)
    with pytest.raises(ArgumentError, match="K="):
        functional.all_gather_matmul(t(4, 4), t(3, 3), handle=handle)
    with pytest.raises(ArgumentError, match="one dtype"):
        functional.matmul_all_gather(t(4, 4), t(4, 3, dtype=torch.float16), handle=handle)
    wide = t(world, world, dtype=torch.float64)
    for name, kernel in (
        ("all_gather_matmul", "pull"), ("matmul_all_reduce", "two_shot"), ("matmul_reduce_scatter", "fused"),
        ("matmul_all_gather", "fused"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="float64 is for algorithm 'torch'"):
            getattr(functional, name)(
                wide[:, :1] if name == "all_gather_matmul" else wide, wide, handle=handle, algorithm=kernel
            )
    if world > 1:
        with pytest.raises(ArgumentError, match=f"multiple of {world} ranks"):
            functional.reduce_scatter(t(world + 1), handle=handle)
        # Ranks that disagree all learn of it.
        with pytest.raises(RankMismatch, match=r"A is .*on rank 0"):
            functional.matmul_all_reduce(t(4 + rank, 4), t(4, 4), handle=handle)
        with pytest.raises(IrisError) as caught:
            functional.all_gather_matmul(t(4, 4), t(4 * world + (rank == 1), 4), handle=handle)
        assert isinstance(caught.value, ArgumentError if rank == 1 else RankMismatch)
        with pytest.raises(RankMismatch, match="bytes on the heap"):
            functional.all_gather(t(5000 + rank), handle=handle)
    # Memory grows to the largest call and stays; results and what autograd keeps are elsewhere.
    before = ctx.heap.used_bytes
    for size in (3000, 5000, 4000):
        functional.all_gather(t(size), handle=handle)
    assert ctx.heap.used_bytes - before < 2 * 4 * 5000 * world + 4096
    ctx.barrier()
    # A handle keeps no context alive.
    other = iris.iris(1 << 20)
    gone = functional.handle(other)
    assert gone != handle
    assert functional.all_reduce(t(3) + 1, handle=gone).eq(world).all()
    other.barrier()
    del other
    gc.collect()
    with pytest.raises(ArgumentError, match=f"'{gone}' stands for no context"):
        functional.all_reduce(t(3), handle=gone)
    assert functional.all_reduce(t(3) + 1, handle=handle).eq(world).all()
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_errors(ranks, world):
    ranks(world).run(body_errors)


def body_in_one_process(ctx):
    if ctx.get_num_ranks() > 1:
        with pytest.raises(UnsupportedError, match="process for each rank"):
            functional.handle(ctx)
        return
    handle = functional.handle(ctx)
    x = torch.eye(4, requires_grad=True)
    functional.matmul_all_gather(x, x, handle=handle).sum().backward()
    assert x.grad.eq(2).all()


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_that_share_a_process_are_refused(sim, count):
    sim.run(body_in_one_process, count)
