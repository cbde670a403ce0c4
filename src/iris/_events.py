"""Every event of a trace: its id and its name. No other file lists them."""

from __future__ import annotations

from enum import IntEnum


class Event(IntEnum):
    """Ids of trace events.

    0 to 1023 are operations of the library on memory, 1024 to 2047 movement of data by a kernel, 2048 to 3071
    arithmetic, 3072 to 4095 synchronisation.
    """

    LOAD = 0
    STORE = 1
    GET = 2
    PUT = 3
    COPY = 4
    ATOMIC_ADD = 5
    ATOMIC_SUB = 6
    ATOMIC_CAS = 7
    ATOMIC_XCHG = 8
    ATOMIC_XOR = 9
    ATOMIC_AND = 10
    ATOMIC_OR = 11
    ATOMIC_MIN = 12
    ATOMIC_MAX = 13
    WG_FETCH = 14
    WG_GEMM = 15
    WG_GEMM_WAIT = 16
    WG_SDMA = 17
    FETCH = 1024
    COMPUTE = 2048
    REDUCE = 2049
    WAIT = 3072
    BARRIER = 3073


EVENT_NAMES: dict[int, str] = {int(event): event.name.lower() for event in Event}


def event_name(event_id: int) -> str:
    """The name of an event, ``unknown_<id>`` for an id that is not an :class:`Event`."""
    return EVENT_NAMES.get(event_id, f"unknown_{event_id}")
