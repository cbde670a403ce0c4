"""``ctx.tracing``: buffers for what kernels record, and the traces that come of them.

Recording is local to a rank. :meth:`Tracing.export` with ``merge=True`` is collective: it compares the ranks' clocks
(:mod:`iris.tracing.clocks`) and brings all events to rank 0, in pieces over the context's exchange.
"""

from __future__ import annotations

import os
import socket
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris._events import event_name
from iris.device.tracing import BUFFERS, OPEN
from iris.errors import ArgumentError
from iris.runtime.context import _TRACE_WORDS
from iris.tracing import chrome, clocks

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_MOST_EVENTS = 2**31 - 1  # handles have 32 bits
_PIECE_BYTES = 1 << 20  # the stores of torch.distributed refuse large values


class Tracing:
    """Tracing of one context.

    Attributes:
        enabled: whether kernels with ``tracing=True`` record.
        max_events: how many events the buffers hold; further ones are counted and not stored.
        trace_buffers: name -> tensor of ``max_events`` elements, in ordinary device memory. Times are in ticks of the
            device's clock; ``duration_cycles`` is -1 for a span without an end.
        trace_counter: int64[1], how many events there were since :meth:`enable` or :meth:`reset`.
        op_index_counter: the same tensor: the number of an event is its ``op_index``.
    """

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self.enabled = False
        self.max_events = 0
        self.trace_buffers: dict[str, torch.Tensor] = {}
        self.trace_counter: torch.Tensor | None = None

    @property
    def op_index_counter(self) -> torch.Tensor | None:
        """The counter of ``op_index``: :attr:`trace_counter`."""
        return self.trace_counter

    def enable(self, max_events: int = 1_000_000) -> None:
        """Record from now on, into empty buffers. Waits for the rank's launches; takes 64 bytes of memory an event.

        The tensor of ``get_device_context()`` stays the same one. Enabling again empties the buffers and may resize
        them.

        Raises:
            ArgumentError: ``max_events`` is no number of events.
            CaptureError: a graph is being captured.
        """
        if isinstance(max_events, bool) or not isinstance(max_events, int) or not 0 < max_events <= _MOST_EVENTS:
            raise ArgumentError(f"max_events must be a whole number from 1 to {_MOST_EVENTS}, got {max_events!r}")
        self.disable()
        ctx, device = self._ctx, self._ctx.get_device()
        if max_events != self.max_events:
            self.trace_buffers = {}  # before the new ones are made
            self.trace_buffers = {
                name: torch.empty(max_events, dtype=torch.int64 if wide else torch.int32, device=device)
                for name, wide in BUFFERS.items()
            }
            self.max_events = max_events
        self.trace_counter = torch.zeros(1, dtype=torch.int64, device=device)
        for name, tensor in (*self.trace_buffers.items(), ("counter", self.trace_counter)):
            ctx.heap.region.note(tensor, f"trace buffer {name}")
        counter = self.trace_counter.data_ptr()
        ctx.write_trace_words(
            [1, max_events, counter, counter, *(tensor.data_ptr() for tensor in self.trace_buffers.values())]
        )
        self.enabled = True

    def disable(self) -> None:
        """Record nothing from now on; what was recorded can still be exported. Waits for the rank's launches.

        Raises:
            CaptureError: a graph is being captured.
        """
        self._ctx.write_trace_words([0] * _TRACE_WORDS)
        self.enabled = False

    def reset(self) -> None:
        """Forget what was recorded. Waits for the rank's launches; warns when nothing can have been recorded."""
        if self.trace_counter is None:
            self._ctx.warning("tracing.reset(): tracing is not enabled; call ctx.tracing.enable() first")
            return
        self._ctx._device_synchronize()
        self.trace_counter.zero_()
        self._ctx._device_synchronize()

    @property
    def dropped_events(self) -> int:
        """Events that did not fit into the buffers. Waits for the rank's launches."""
        return max(0, self._counted() - self.max_events)

    def events(self) -> dict[str, torch.Tensor]:
        """What was recorded: for each of :attr:`trace_buffers` its filled part, on the CPU. Waits for the launches."""
        stored = min(self._counted(), self.max_events)
        return {name: tensor[:stored].cpu() for name, tensor in self.trace_buffers.items()}

    def export(self, filename: str | Path = "trace.json", merge: bool = False) -> dict[str, Any]:
        """Write what was recorded to ``<stem>_rank<rank>.json``; with ``merge`` also that of all ranks to ``filename``.

        Times are in microseconds. Without ``merge`` they are those of the rank's own device clock. ``merge`` is
        collective, and brings them to the clock of rank 0; how exactly, the metadata says (``clock_uncertainty_us``).
        The merged file begins at 0.

        A wait that did not end does not keep the trace from being written.

        Returns:
            The rank's trace; with ``merge`` the merged one on rank 0 and ``{}`` elsewhere. ``{}``, with a warning, when
            tracing was never enabled.
        """
        ctx = self._ctx
        recorded = self.trace_counter is not None
        if not recorded:
            ctx.warning("tracing.export(): tracing is not enabled, so there is nothing to write")
            if not merge:
                return {}
        ctx._device_synchronize()
        columns = {name: tensor.numpy() for name, tensor in self.events().items()}
        dropped = self.dropped_events
        if dropped:
            ctx.warning(
                f"tracing: {dropped} of {self._counted()} events did not fit into max_events={self.max_events} and are "
                f"missing; call ctx.tracing.enable(max_events={self._counted()})"
            )
        path = Path(filename)
        aligned = clocks.alignment(ctx) if merge else None
        if aligned is not None and not aligned.known:
            ctx.warning("tracing: a wait did not end, so the ranks' clocks could not be compared")
        own = self._document(columns, dropped, aligned)
        if recorded:
            chrome.write(path.with_name(f"{path.stem}_rank{ctx.get_rank()}{path.suffix or '.json'}"), own)
        if aligned is None:
            return own
        return self._merged(path, columns, own["metadata"], aligned)

    def _counted(self) -> int:
        if self.trace_counter is None:
            return 0
        self._ctx._device_synchronize()
        return int(self.trace_counter.item())

    def _document(
        self, columns: Mapping[str, np.ndarray], dropped: int, aligned: clocks.Alignment | None
    ) -> dict[str, Any]:
        ctx = self._ctx
        rank = ctx.get_rank()
        facts = {
            "rank": rank,
            "max_events": self.max_events,
            "dropped_events": dropped,
            "clock": clocks.clock_of(ctx),
            "aligned": aligned is not None and aligned.known,
        }
        if aligned is not None:
            facts["clock_offset_us"] = aligned.offset_ns[rank] / 1e3
            facts["clock_uncertainty_us"] = aligned.uncertainty_ns[rank] / 1e3
        events = self._chrome_events(columns, rank, aligned.offset_ns[rank] if aligned is not None else 0)
        return chrome.document([rank], events, {**facts, **self._surroundings()})

    def _merged(
        self, path: Path, columns: Mapping[str, np.ndarray], own: Mapping[str, Any], aligned: clocks.Alignment
    ) -> dict[str, Any]:
        ctx = self._ctx
        of_ranks = ctx.exchange.all_gather("tracing.export(): what was recorded", dict(own))
        found = _gathered(ctx, columns)
        # Nobody goes on, or ends, before rank 0 has everything.
        ctx.exchange.all_gather("tracing.export(): merged", None)
        if ctx.get_rank() != 0:
            return {}
        events = [
            event
            for rank, their in enumerate(found)
            for event in self._chrome_events(their, rank, aligned.offset_ns[rank])
        ]
        first = min((event["ts"] for event in events), default=0.0)
        for event in events:
            event["ts"] = round(event["ts"] - first, 3)
        merged = chrome.document(
            range(ctx.get_num_ranks()),
            events,
            {
                "total_events": len(events),
                "max_events": max(facts["max_events"] for facts in of_ranks),
                "dropped_events": {str(rank): facts["dropped_events"] for rank, facts in enumerate(of_ranks)},
                "timestamp_offset": first,
                "aligned": aligned.known,
                "clock": [facts["clock"] for facts in of_ranks],
                "clock_offset_us": [ns / 1e3 for ns in aligned.offset_ns],
                "clock_uncertainty_us": [ns / 1e3 for ns in aligned.uncertainty_ns],
                **self._surroundings(),
            },
        )
        chrome.write(path if path.suffix else path.with_suffix(".json"), merged)
        return merged

    def _chrome_events(self, columns: Mapping[str, np.ndarray], rank: int, offset_ns: int) -> list[dict[str, Any]]:
        """Events in the order of their times, on tracks on which spans lie beside or within each other."""
        if not columns or columns["timestamp"].size == 0:
            return []
        target = self._ctx.target
        ns_per_tick = 1_000_000_000 // target.clock_hz
        starts = columns["timestamp"] * ns_per_tick - offset_ns
        lengths = columns["duration_cycles"]
        ends = starts + np.where(lengths == OPEN, 0, lengths * ns_per_tick)
        order = np.lexsort((columns["op_index"], -ends, starts))
        rows = zip(*(columns[name][order].tolist() for name in BUFFERS), strict=True)
        lanes = _Lanes()
        events = []
        for row, start, end in zip(rows, starts[order].tolist(), ends[order].tolist(), strict=True):
            kind, program, pid_m, pid_n, _, peer, die, unit, _, address, length, op_index, payload = row
            track = target.unit_name(die, unit)
            lane = lanes.take(track, program, start, end)
            args = {"program_id": program, "pid_m": pid_m, "pid_n": pid_n, "target_rank": peer}
            args |= {"address": hex(address), "xcc_id": die, "cu_id": unit}
            args |= {"op_index": op_index, "payload_size": payload}
            track += f"_S{lane}" if lane else ""
            until = None if length == OPEN else end / 1e3
            events.append(chrome.event(event_name(kind), rank, track, start / 1e3, until, args))
        return events

    def _surroundings(self) -> dict[str, Any]:
        from iris.hip import get_rocm_version

        ctx, device = self._ctx, self._ctx.get_device()
        on_gpu = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
        rocm = get_rocm_version()
        simulated: dict[str, Any] = {}
        if ctx.runtime == "sim":
            # In virtual time a kernel's clock is the model's; without, it counts the kernel's accesses.
            timed = getattr(ctx._local_world, "clock", None) is not None
            machine = ctx.target.name.removeprefix("simulated ")
            simulated = {"predicted": True, "machine": machine} if timed else {"steps": True}
        return {
            **simulated,
            "world_size": ctx.get_num_ranks(),
            "fields": list(BUFFERS),
            "process_name": os.path.basename(sys.argv[0]) if sys.argv else "",
            "command_line": " ".join(sys.argv),
            "hostname": socket.gethostname(),
            "gpu_device_name": ctx.target.name,
            "gpu_total_memory_gb": round(memory / 1e9, 1) if memory is not None else None,
            "gpu_arch": ctx.target.arch,
            "gpu_cu_count": ctx.target.compute_units,
            "gpu_num_xcc": ctx.target.chiplets,
            "rocm_version": ".".join(map(str, rocm)) if rocm[0] >= 0 else None,
        }


class _Lanes:
    """Deals out the tracks of a unit: programs that it ran side by side get lanes of their own."""

    def __init__(self):
        self._open: dict[str, list[list[tuple[int, int]]]] = {}
        self._last: dict[tuple[str, int], int] = {}

    def take(self, track: str, program: int, start: int, end: int) -> int:
        """The lane of a span; spans come in the order of their starts, the longer ones of equal starts first.

        A program keeps to its lane as long as that has room.
        """
        lanes = self._open.setdefault(track, [])
        usual = self._last.get((track, program), 0)
        for lane in (usual, *range(len(lanes) + 1)):
            if lane == len(lanes):
                lanes.append([])
            spans = lanes[lane]
            while spans and spans[-1][1] <= start:
                spans.pop()
            if not spans or (spans[-1][0] == program and end <= spans[-1][1]):
                break
        spans.append((program, end))
        self._last[track, program] = lane
        return lane


def _gathered(ctx: Iris, columns: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Every rank's columns, on rank 0; on the others an empty list. Collective."""
    packed = zlib.compress(b"".join(columns[name].tobytes() for name in BUFFERS if name in columns), 1)
    pieces = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
    counts = ctx.exchange.all_gather("tracing.export(): pieces", len(pieces))
    rank = ctx.get_rank()
    received: list[list[bytes]] = [[] for _ in counts]
    for turn in range(max(counts)):
        for peer in range(1, len(counts)):
            if turn < counts[peer] and rank in (0, peer):
                mine = pieces[turn] if rank == peer else None
                received[peer].append(ctx.exchange.all_gather("tracing.export(): events", mine, (0, peer))[1])
    if rank != 0:
        return []
    return [dict(columns), *(_unpacked(b"".join(theirs)) for theirs in received[1:])]


def _unpacked(packed: bytes) -> dict[str, np.ndarray]:
    content = zlib.decompress(packed)
    count = len(content) // sum(8 if wide else 4 for wide in BUFFERS.values())
    columns, at = {}, 0
    for name, wide in BUFFERS.items():
        columns[name] = np.frombuffer(content, np.int64 if wide else np.int32, count, at)
        at += columns[name].nbytes
    return columns
