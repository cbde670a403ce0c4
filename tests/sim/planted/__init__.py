"""A gallery of planted bugs: what the simulator must find, each beside a twin that differs in a word and is right.

The modules hold the kernels and the bodies and import nothing from here, so that rank processes can import them from
their files. A body takes a context and compares its numbers after the last barrier, when all accesses have happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from iris import errors

from . import bounds, flags, locks, ordering, progress, reuse, streams


@dataclass(frozen=True)
class Planted:
    """A bug and its right twin.

    Attributes:
        name: of the bug.
        world_size: ranks that the bodies take.
        faulty, fixed: the bodies.
        error: class of what the simulator must raise, or of the warning it must give.
        message: regular expressions that its message must all match.
        origin: the fault of a real program that it stands for.
        options: further arguments of ``iris.sim.run``.
    """

    name: str
    world_size: int
    faulty: Callable
    fixed: Callable
    error: type[Exception]
    message: tuple[str, ...]
    origin: str
    options: dict[str, Any] = field(default_factory=dict)


PLANTED = [
    Planted(
        "stale flag",
        2,
        flags.stale_flag_faulty,
        flags.stale_flag_fixed,
        errors.RaceError,
        ("stale_flag_kernel", "inbox"),
        "Readiness is signalled by the constant 1: the second call on one workspace finds the 1 of the first.",
    ),
    Planted(
        "counter wrap",
        2,
        flags.counter_wrap_faulty,
        flags.counter_wrap_fixed,
        errors.RaceError,
        ("counter_wrap_kernel", "inbox"),
        "A wait compares `flag < epoch`; after 2**31 calls of a long-running server every wait ends at once.",
    ),
    Planted(
        "wrong flag",
        3,
        flags.wrong_flag_faulty,
        flags.wrong_flag_fixed,
        errors.DeadlockError,
        ("wrong_flag_kernel", "flags", "rank 0", "rank 1", "rank 2"),
        "A ring mixes up the neighbours: a rank waits for the flag of the one it sends to. Two ranks do not show it.",
    ),
    Planted(
        "overwritten arrival",
        3,
        flags.overwritten_arrival_faulty,
        flags.overwritten_arrival_fixed,
        errors.DeadlockError,
        ("overwritten_arrival_kernel", "arrived"),
        "Arrivals at one flag are signalled by overwriting it, not by counting.",
    ),
    Planted(
        "lost token",
        3,
        flags.lost_token_faulty,
        flags.lost_token_fixed,
        errors.DeadlockError,
        ("lost_token_kernel", "tokens"),
        "Two producers set one flag to their own values; the one that comes first is gone before it was seen.",
    ),
    Planted(
        "set at gpu scope",
        2,
        ordering.set_at_gpu_scope,
        ordering.strong_flag,
        errors.RaceError,
        ("weak_flag_kernel", "gpu"),
        "A reduce-scatter releases its flags at the scope of one GPU although a peer waits for them.",
    ),
    Planted(
        "wait at gpu scope",
        2,
        ordering.wait_at_gpu_scope,
        ordering.strong_flag,
        errors.RaceError,
        ("weak_flag_kernel", "gpu"),
        "An all-reduce waits at the scope of one GPU for a flag that a peer sets.",
    ),
    Planted(
        "relaxed set",
        2,
        ordering.relaxed_set,
        ordering.strong_flag,
        errors.RaceError,
        ("weak_flag_kernel", "inbox", "relaxed"),
        "A flag is set by a relaxed exchange: it may be seen before the data.",
    ),
    Planted(
        "relaxed wait",
        2,
        ordering.relaxed_wait,
        ordering.strong_flag,
        errors.RaceError,
        ("weak_flag_kernel", "inbox", "relaxed"),
        "A flag is polled by a relaxed atomic and the data is read right after.",
    ),
    Planted(
        "volatile poll",
        2,
        ordering.volatile_poll_faulty,
        ordering.volatile_poll_fixed,
        errors.RaceError,
        ("volatile_poll_kernel", "inbox"),
        "A flag is polled by volatile loads, taken for an acquire.",
    ),
    Planted(
        "early signal",
        2,
        ordering.early_signal_faulty,
        ordering.early_signal_fixed,
        errors.RaceError,
        ("early_signal_kernel", "inbox"),
        "The signal stands before the store that it announces.",
    ),
    Planted(
        "early load",
        2,
        ordering.early_load_faulty,
        ordering.early_load_fixed,
        errors.RaceError,
        ("early_load_kernel", "inbox"),
        "A load is moved above the wait to hide its latency.",
    ),
    Planted(
        "missing debug barrier",
        2,
        ordering.missing_debug_barrier_faulty,
        ordering.missing_debug_barrier_fixed,
        errors.MissingBarrierWarning,
        ("missing_debug_barrier_kernel", "debug_barrier"),
        "One warp signals while others still store: a stale tile with four warps or more.",
    ),
    Planted(
        "unwaited tile",
        2,
        ordering.unwaited_tile_faulty,
        ordering.unwaited_tile_fixed,
        errors.RaceError,
        ("unwaited_tile_kernel", "tiles"),
        "A flag stands for several blocks of K, and the consumer begins in the middle of a group.",
    ),
    Planted(
        "unread inbox",
        2,
        reuse.unread_inbox_faulty,
        reuse.unread_inbox_fixed,
        errors.RaceError,
        ("unread_inbox_kernel", "inbox"),
        "Ready without consumed: a one-shot all-reduce overwrites the block that a slow consumer has not read.",
    ),
    Planted(
        "no entry barrier",
        2,
        reuse.no_entry_barrier_faulty,
        reuse.no_entry_barrier_fixed,
        errors.RaceError,
        ("pull_kernel", "source"),
        "A two-shot all-reduce reads the peers' inputs without asking whether they have been written.",
    ),
    Planted(
        "no exit barrier",
        2,
        reuse.no_exit_barrier_faulty,
        reuse.no_exit_barrier_fixed,
        errors.RaceError,
        ("pull_kernel", "source"),
        "A rank fills its input for the next call while peers still read that of the last one.",
    ),
    Planted(
        "late clear by the host",
        2,
        reuse.late_host_clear_faulty,
        reuse.late_host_clear_fixed,
        errors.RaceError,
        ("add_kernel", "out"),
        "`out.zero_()` of a late rank wipes what its peers have added already.",
    ),
    Planted(
        "late clear by a kernel",
        2,
        reuse.late_kernel_clear_faulty,
        reuse.late_kernel_clear_fixed,
        errors.RaceError,
        ("clear_kernel", "add_kernel", "out"),
        "Stream order is taken for an order between the ranks: a kernel clears, the next accumulates.",
    ),
    Planted(
        "fresh zeros",
        2,
        reuse.fresh_zeros_faulty,
        reuse.fresh_zeros_fixed,
        errors.RaceError,
        ("add_kernel", "out"),
        "`ctx.zeros` of a late rank wipes what its peers have added: ranks allocate alike, but not at one time.",
    ),
    Planted(
        "counter not reset",
        2,
        reuse.counter_not_reset_faulty,
        reuse.last_arriver_fixed,
        errors.UninitializedReadError,
        ("out",),
        "Nobody is the last to arrive in the second launch of a split-K kernel, and nobody writes its output.",
    ),
    Planted(
        "counter reset early",
        2,
        reuse.counter_reset_early_faulty,
        reuse.last_arriver_fixed,
        errors.RaceError,
        ("last_arriver_kernel", "arrived"),
        "The first program resets the counter of arrivals, perhaps after others have arrived.",
    ),
    Planted(
        "relaxed arrival",
        2,
        reuse.relaxed_arrival_faulty,
        reuse.last_arriver_fixed,
        errors.RaceError,
        ("last_arriver_kernel", "partials"),
        "Split-K arrivals are counted by a relaxed atomic, as a plain counter would be.",
    ),
    Planted(
        "one flag for all",
        2,
        reuse.one_flag_for_all_faulty,
        reuse.one_flag_for_all_fixed,
        errors.RaceError,
        ("one_flag_for_all_kernel", "inbox"),
        "The last program signals a peer for all programs, but has not acquired what they stored.",
    ),
    Planted(
        "late exchange",
        2,
        streams.late_exchange_faulty,
        streams.late_exchange_fixed,
        errors.RaceError,
        ("push_kernel", "inbox"),
        "The hosts meet while the collective still runs on its own stream.",
    ),
    Planted(
        "barrier of another stream",
        2,
        streams.barrier_of_other_stream_faulty,
        streams.barrier_of_other_stream_fixed,
        errors.RaceError,
        ("push_kernel", "inbox"),
        "A barrier waits for the current stream, the kernel runs on another.",
    ),
    Planted(
        "shared workspace",
        1,
        streams.shared_workspace_faulty,
        streams.shared_workspace_fixed,
        errors.RaceError,
        ("reverse_kernel", "workspace"),
        "Two streams use one workspace at once.",
    ),
    Planted(
        "early event",
        1,
        streams.early_event_faulty,
        streams.early_event_fixed,
        errors.RaceError,
        ("scale_kernel",),
        "An event is recorded before the launch it should stand for.",
    ),
    Planted(
        "read too soon",
        1,
        streams.read_too_soon_faulty,
        streams.read_too_soon_fixed,
        errors.RaceError,
        ("scale_kernel", "out", "different streams"),
        "The result of an asynchronous operation is read before the current stream waits for it.",
    ),
    Planted(
        "unordered input",
        1,
        streams.unordered_input_faulty,
        streams.unordered_input_fixed,
        errors.RaceError,
        ("scale_kernel", "block", "different streams"),
        "The input is made on the current stream, an asynchronous operation reads it on its own.",
    ),
    Planted(
        "short flags",
        2,
        bounds.short_flags_faulty,
        bounds.short_flags_fixed,
        errors.OutOfBoundsError,
        ("short_flags_kernel", "flags"),
        "A workspace made for big tiles is used with small ones: the flags run past their array into a neighbour.",
    ),
    Planted(
        "past the end",
        2,
        bounds.past_the_end_faulty,
        bounds.past_the_end_fixed,
        errors.OutOfBoundsError,
        ("past_the_end_kernel", "gathered"),
        "A peer's slot is its rank where the buffer has no slot for the own rank.",
    ),
    Planted(
        "unwritten tile",
        2,
        bounds.unwritten_tile_faulty,
        bounds.unwritten_tile_fixed,
        errors.UninitializedReadError,
        ("out",),
        "The grid is `n // BLOCK`: the ragged last tile keeps what the memory held.",
    ),
    Planted(
        "wrapped tile",
        2,
        bounds.wrapped_tile_faulty,
        bounds.wrapped_tile_fixed,
        errors.RaceError,
        ("wrapped_tile_kernel", "out"),
        "Offsets are taken modulo the size and masked afterwards, so the ragged tile goes on at the first one.",
    ),
    Planted(
        "launch order",
        2,
        progress.launch_order_faulty,
        progress.launch_order_fixed,
        errors.DeadlockError,
        ("launch_order_kernel", "flags", "resident_programs"),
        "Consumers fill the device and wait for producers of the same grid, which then cannot start.",
        {"resident_programs": 2},
    ),
    Planted(
        "barrier of the world",
        3,
        progress.group_barrier_faulty,
        progress.group_barrier_fixed,
        errors.DeadlockError,
        ("device_barrier_kernel", "barrier"),
        "A barrier of a group defaults to the world, where not everyone comes.",
    ),
    Planted(
        "counter of two groups",
        3,
        progress.counting_barrier_faulty,
        progress.counting_barrier_fixed,
        errors.DeadlockError,
        ("counting_barrier_kernel", "counter"),
        "Barriers of a group and of the world count at one place.",
    ),
    Planted(
        "ring tail",
        3,
        progress.ring_tail_faulty,
        progress.ring_tail_fixed,
        errors.DeadlockError,
        ("ring_tail_kernel", "flags"),
        "The number of tiles is no multiple of the tiles a flag: nobody signals the last group of a ring all-reduce.",
    ),
    Planted(
        "relaxed unlock",
        3,
        locks.relaxed_unlock_faulty,
        locks.relaxed_unlock_fixed,
        errors.RaceError,
        ("relaxed_unlock_kernel", "total"),
        "A spin lock is given back by a relaxed exchange.",
    ),
    Planted(
        "wait under lock",
        3,
        locks.wait_under_lock_faulty,
        locks.wait_under_lock_fixed,
        errors.DeadlockError,
        ("wait_under_lock_kernel", "lock", "turn"),
        "A rank takes the lock of a tile and then waits for a rank that needs the lock first.",
    ),
]
