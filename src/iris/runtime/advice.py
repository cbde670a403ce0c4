"""What would have ordered two accesses that race, in words."""

from __future__ import annotations

from iris.runtime.clocks import CTA, GPU, PLAIN, SYS
from iris.runtime.reports import Access


def missing_order(first: Access, second: Access, first_level: int, second_level: int) -> str:
    """What would order two accesses, in words."""
    across = first.rank != second.rank
    if (PLAIN < first_level < SYS and across) or (PLAIN < second_level < SYS and across):
        narrow = first if PLAIN < first_level < SYS else second
        scope = "gpu" if max(min(first_level, second_level), CTA) == GPU else "cta"
        return (
            f"the {narrow.what} of rank {narrow.rank} has {scope} scope, which reaches only programs of its own rank; "
            "give both scope='sys'"
        )
    if (first_level > PLAIN) != (second_level > PLAIN):
        plain = first if first_level == PLAIN else second
        return (
            f"the {plain.what} of {plain.who()} is no atomic, so it may not happen beside one. Order it before or "
            "after "
            f"it with a flag{' or a barrier of the ranks' if across else ''}, or make it an atomic"
        )
    if not first.kernel or not second.kernel:
        host = first if not first.kernel else second
        other = second if host is first else first
        if across:
            return (
                f"nothing orders the host's {host.what} on rank {host.rank} and the kernel of rank {other.rank}: call "
                "ctx.barrier() between them (it waits for the streams too), or ctx.device_barrier()"
            )
        return "they are on different streams of the rank: let one stream wait for an event of the other"
    if across:
        before, after, when = first, second, ("", "")
        if first.kernel == second.kernel and first.nth != second.nth:
            # Between calls, the earlier one has to be done before the later one may touch the memory again.
            before, after = sorted((first, second), key=lambda access: access.nth)
            when = (f" in launch {before.nth}", f" in launch {after.nth}")
        return (
            f"rank {before.rank} must release at scope 'sys' (iris.signal.notify) after its access{when[0]}, and rank "
            f"{after.rank} acquire the same flag (iris.signal.wait) before its own{when[1]}; relaxed atomics, 'gpu' "
            "scope and volatile loads do not order ranks"
        )
    if first.launch == second.launch:
        return (
            "they are programs of one launch, which run in any order, and relaxed atomics and volatile loads do not "
            "order them: give the element to one program, or release and "
            "acquire a flag between the two"
        )
    return "they are launches on different streams of the rank: let one stream wait for an event of the other"
