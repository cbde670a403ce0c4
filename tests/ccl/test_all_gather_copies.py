"""all_gather by the copy engine: its meetings, its streams, mixed with other calls, what it refuses."""

import re

import pytest
import torch

from collective_data import Buffer, movable, on_new_context
from iris import sim
from iris.ccl import Config, _copies
from iris.errors import RaceError, RankMismatch, UnsupportedError
from iris.runtime import launch
from iris.runtime.channels import Channels
from iris.runtime.streams import Event
from iris.testing import reference

COPIES = Config(all_gather_variant="copy_engine")


class Case:
    """One all-gather on tensors of its own, its output filled with NaN or bits set.

    Args:
        ctx: the context.
        shape, dtype, dim: of the input.
        group: ranks, None for all.
        in_place: whether the input is the own piece of the output.
        layout: of the output, heap: where the input lies.
    """

    def __init__(self, ctx, shape, dtype=torch.float32, dim=0, group=None, in_place=False, layout="plain", heap=True):
        self.ctx, self.shape, self.dtype, self.dim, self.group = ctx, shape, dtype, dim, group
        self.members = list(range(ctx.get_num_ranks())) if group is None else list(group)
        whole = list(shape) or [1]
        whole[dim] *= len(self.members)
        self.out = Buffer(ctx, whole, dtype, layout)
        self.inp = None if in_place else Buffer(ctx, shape, dtype, heap=heap)

    def values(self, seed):
        return [movable(self.shape, self.dtype, seed=seed, rank=rank) for rank in self.members]

    def issue(self, seed, config=COPIES, **given):
        place = self.members.index(self.ctx.get_rank())
        values = self.values(seed)
        self.out.clear()
        if self.inp is None:
            inp = self.out.tensor.tensor_split(len(self.members), dim=self.dim)[place]
            inp.copy_(values[place])
        else:
            inp = self.inp.set(values[place]).tensor
        return self.ctx.ccl.all_gather(self.out.tensor, inp, group=self.group, config=config, dim=self.dim, **given)

    def check(self, seed):
        self.ctx.synchronize()
        self.out.check(reference.all_gather(self.values(seed), self.dim))


def once(ctx, *args, seed=0, **given):
    case = Case(ctx, *args, **given)
    plan = case.issue(seed).plan
    case.check(seed)
    return plan


def body_shapes(ctx):
    world = ctx.get_num_ranks()
    for seed, (shape, dim) in enumerate([((), 0), ((37, 3), 0), ((1, 1, 67), -1), ((0, 4), 0), ((5001,), 0)]):
        plan = once(ctx, shape, torch.bfloat16, dim, seed=seed, heap=seed % 2 == 0)
        assert (plan.algorithm, plan.config) == (("copy_engine", None) if world > 1 else ("copy", None))
    once(ctx, (5, 6), in_place=True)
    once(ctx, (1, 6), layout="rows")  # pieces that lie together in an output that does not


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shapes_and_places(ranks, world):
    ranks(world).run(body_shapes)


def body_dtypes(ctx):
    for seed, dtype in enumerate((torch.int8, torch.float8_e4m3fn, torch.bool, torch.int16, torch.complex64)):
        once(ctx, (3, 5), dtype, seed=seed)


@pytest.mark.parametrize("world", [2])
def test_dtypes(ranks, world):
    ranks(world).run(body_dtypes)


def body_groups(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    same_parity = [r for r in range(world) if r % 2 == rank % 2]
    once(ctx, (7,), group=same_parity, seed=1)
    once(ctx, (7,), group=[2, 0, 1], seed=2) if rank < 3 else Case(ctx, (7,), group=[2, 0, 1])
    once(ctx, (7,), seed=3)


@pytest.mark.parametrize("world", [4])
def test_groups(ranks, world):
    ranks(world).run(body_groups)


def body_mixed(ctx, rounds):
    """Over the same channels, with inputs that change: other algorithms, groups, slots, and calls beside the stream."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    copied, beside, kernel, pair = (
        Case(ctx, (size,), group=g) for size, g in ((70, None), (3, None), (70, None), (9, [1, 0]))
    )
    reduced = ctx.zeros(20)
    for turn in range(rounds):
        work = beside.issue(turn, async_op=True)
        kernel.issue(turn, Config(all_gather_variant="persistent", comm_sms=2, block_size_m=1, block_size_n=16))
        copied.issue(turn)
        ctx.ccl.all_reduce(
            reduced, torch.full_like(reduced, rank + turn), config=Config(all_reduce_variant="push", comm_sms=1)
        )
        if rank < 2:
            pair.issue(turn, async_op=turn % 2 == 0).wait()
        copied.issue(turn + 50)
        work.wait()
        for case, seed in ((beside, turn), (kernel, turn), (copied, turn + 50)):
            case.check(seed)
        if rank < 2:
            pair.check(turn)
        assert (reduced == sum(range(world)) + world * turn).all()


@pytest.mark.parametrize(("world", "rounds"), [(2, 4), (3, 2)])
def test_between_other_calls_over_the_same_channels(ranks, world, rounds):
    ranks(world).run(body_mixed, rounds)


def body_kept_streams(ctx):
    case = Case(ctx, (5,))
    case.issue(0)

    def refused():
        raise AssertionError("a later call made a stream")

    ctx.new_stream, used = refused, ctx.heap.used_bytes
    try:
        for seed in range(2):
            case.issue(seed)
            case.check(seed)
    finally:
        del ctx.new_stream
    assert ctx.heap.used_bytes == used


@pytest.mark.parametrize("world", [2])
def test_later_calls_make_nothing(ranks, world):
    ranks(world).run(body_kept_streams)


def body_compiled_only(ctx):
    """Where launches are kept instead of made, as tuning does to compile them, nothing moves."""
    case = Case(ctx, (5,), heap=False)
    case.issue(0)
    case.check(0)
    with launch.compiling(ctx):
        case.issue(1)
    ctx.barrier()
    assert (case.out.memory.view(torch.uint8) == 255).all()
    case.issue(2)
    case.check(2)


@pytest.mark.parametrize("world", [2])
def test_nothing_is_written_where_nothing_is_launched(ranks, world):
    ranks(world).run(body_compiled_only)


def body_refusals(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    out, inp = ctx.zeros(4 * world, 3), ctx.zeros(4, 3)
    possible = "possible: contiguous tensors whose sizes before dim are 1, or .*'persistent' or 'partitioned'"
    wide = ctx.zeros(4, 3 * world)
    with pytest.raises(UnsupportedError, match=f"a rank's piece of the output does not; {possible}"):
        ctx.ccl.all_gather(wide, inp, config=COPIES, dim=1)
    with pytest.raises(UnsupportedError, match="the input and a rank's piece of the output do not"):
        ctx.ccl.all_gather(wide, ctx.zeros(3, 4).t(), config=COPIES, dim=1)
    # On one rank, and the other learns of it.
    mine = inp if rank == 0 else ctx.zeros(4, 6)[:, ::2]
    expected = (
        (RankMismatch, "rank 1 raised UnsupportedError") if rank == 0 else (UnsupportedError, "the input does not")
    )
    with pytest.raises(expected[0], match=expected[1]):
        ctx.ccl.all_gather(out, mine, config=COPIES)
    plan = ctx.ccl.explain("all_gather", out, inp, config=COPIES)
    assert (plan.algorithm, plan.source, plan.config) == ("copy_engine", "user", None)
    assert ctx.ccl.explain("all_gather", out, inp).algorithm != "copy_engine"  # it runs when it is named


@pytest.mark.parametrize("world", [2])
def test_refusals(ranks, world):
    ranks(world).run(on_new_context, body_refusals, context=None)


def body_three_calls(ctx):
    case = Case(ctx, (50,))
    for seed in range(3):
        # Beside the stream, since the simulator ends what is launched in it before the host goes on.
        case.issue(seed, async_op=True).wait()
        case.check(seed)


def without_meeting(monkeypatch, left_out):
    whole = _copies.meetings

    def meetings(*args):
        meeting, made = whole(*args), []

        def meet(channels):
            made.append(len(made) % 2)
            if made[-1] != left_out:
                meeting(channels)

        return meet

    monkeypatch.setattr(_copies, "meetings", meetings)


def without_order(monkeypatch, method, instead):
    """Streams of copies that take no notice of the stream of the call, or of which it takes none."""
    whole = Channels.streams

    def streams(channels, count):
        made = whole(channels, count)
        for stream in made:
            setattr(stream, method, instead)
        return made

    monkeypatch.setattr(Channels, "streams", streams)


@pytest.mark.parametrize(
    ("plant", "args", "what"),
    [
        (without_meeting, (0,), "fill_|copy_"),
        (without_meeting, (1,), "clone|equal|cpu|_to_copy"),
        (without_order, ("wait_event", lambda event: None), "fill_|copy_"),
        (without_order, ("record_event", Event), "clone|equal|cpu|_to_copy"),
    ],
    ids=["first meeting", "second meeting", "copies wait", "call waits"],
)
def test_what_the_protocol_needs_is_missed(monkeypatch, plant, args, what):
    sim.run(body_three_calls, 2)
    plant(monkeypatch, *args)
    with pytest.raises(RaceError, match="copy_kernel") as caught:
        sim.run(body_three_calls, 2)
    assert re.search(what, str(caught.value)), caught.value
