"""How programs share the memories, caches and links of devices: :class:`Paths`; their figures: :mod:`iris._machine`."""

from __future__ import annotations

from iris._machine import Machine


class Channel:
    """A rate that many share: a ledger of what was taken in each bucket of time.

    It does not matter in which order transfers are entered, as long as they say when they start: a later start that was
    entered first has taken nothing from the buckets before it.

    Attributes:
        rate: units/ns (bytes/ns for memory and links).
        bucket_ns: length of a bucket.
        capacity: the most that one bucket holds.
        used: what was taken, by bucket; buckets that nobody used are absent.
        full: for each bucket without room, a later one; no bucket between the two has room.
        full_from: what is taken of a bucket when it has no room left, but for rounding.
    """

    __slots__ = ("bucket_ns", "capacity", "full", "full_from", "rate", "used")

    def __init__(self, rate: float, bucket_ns: float):
        self.rate = rate
        self.bucket_ns = bucket_ns
        self.capacity = rate * bucket_ns
        self.full_from = self.capacity * (1 - 1e-9)
        self.used: dict[int, float] = {}
        self.full: dict[int, int] = {}

    def first_open(self, bucket: int) -> int:
        """The first bucket from ``bucket`` on that has room."""
        full = self.full
        found = bucket
        while found in full:
            found = full[found]
        while bucket != found:  # shorten the path for the next call
            full[bucket], bucket = found, full[bucket]
        return found


def take(channels: tuple[Channel, ...], start_ns: float, amount: float, rate: float) -> float:
    """Move ``amount`` through all channels at once and return when it has arrived, in ns.

    From ``start_ns`` on, each bucket gives what all channels have left in it, and not more than ``rate`` (units/ns, at
    most the lowest rate of the channels) for the time that is left of it. The first come is served first within a
    bucket, so end times are exact up to one bucket. The channel with the highest rate is the first; all have the same
    ``bucket_ns``.
    """
    # Called at every access of every program: loops are spelled out, and calls are few.
    bucket_ns = channels[0].bucket_ns
    nothing = channels[0].capacity - channels[0].full_from  # what full buckets have left through rounding
    at, bucket = start_ns, int(start_ns // bucket_ns)
    while True:
        part = amount
        possible = rate * ((bucket + 1) * bucket_ns - at)
        for channel in channels:
            left = channel.capacity - channel.used.get(bucket, 0.0)
            if left < possible:
                possible = left
        if possible < part:
            part = possible
            if part <= nothing:
                bucket += 1
                for channel in channels:
                    bucket = channel.first_open(bucket)
                at = bucket * bucket_ns
                continue
        for channel in channels:
            used = channel.used[bucket] = channel.used.get(bucket, 0.0) + part
            if used >= channel.full_from:
                channel.full[bucket] = bucket + 1
        if part == amount:
            # What a bucket has given by now, it gave at the channel's rate.
            end = at + part / rate
            return max([end, *(bucket * bucket_ns + channel.used[bucket] / channel.rate for channel in channels)])
        amount -= part
        bucket += 1
        at = bucket * bucket_ns


class Cache:
    """The tiles that were used last of one device's memory, by the address of their first element."""

    def __init__(self, nbytes: int):
        self._room = nbytes
        self._tiles: dict[int, tuple[int, float, float]] = {}  # address -> bytes, fill begun, fill ended

    def ready_ns(self, address: int, nbytes: int, now: float) -> float | None:
        """When the tile is there; None if it is not, or is there only for programs with a clock later than ``now``."""
        tile = self._tiles.get(address)
        if tile is None or tile[0] < nbytes or tile[1] > now:
            return None
        self._tiles[address] = self._tiles.pop(address)
        return tile[2]

    def fill(self, address: int, nbytes: int, begun: float, ended: float) -> None:
        """Put a tile there in place of those that were not used for longest."""
        old = self._tiles.pop(address, None)
        self._room += (old[0] if old else 0) - nbytes
        self._tiles[address] = (nbytes, begun, ended)
        while self._room < 0:
            self._room += self._tiles.pop(next(iter(self._tiles)))[0]


class Paths:
    """Memories, caches and links of ``world_size`` devices of one kind, joined each to each.

    Attributes:
        channels: those that were used, by kind (``memory``, ``cache``, ``link`` from one device to one other, ``out``
            of and ``in`` to a device) and the ranks at both ends.
    """

    def __init__(self, machine: Machine, world_size: int, bucket_ns: float):
        self.channels: dict[tuple[str, int, int], Channel] = {}
        self._machine = machine
        self._world_size = world_size
        self._bucket_ns = bucket_ns
        self._routes: dict[tuple, tuple[tuple[Channel, ...], float]] = {}
        self._caches = [Cache(machine.cache_bytes) for _ in range(world_size)] if machine.cache_bytes else None

    def move(
        self, rank: int, owner: int, nbytes: int, write: bool, start_ns: float, address: int | None, bulk: bool
    ) -> float:
        """Move a tile between a program of ``rank`` and the memory of ``owner``; returns when it has arrived, ns."""
        cached = cache = None
        if owner == rank and address is not None and self._caches:
            cache = self._caches[rank]
            cached = None if write else cache.ready_ns(address, nbytes, start_ns)
        key = (rank, owner, write, bulk, cached is not None)
        channels, rate = self._routes.get(key) or self._route(*key)
        end = take(channels, start_ns, nbytes, rate)
        if cached is not None:
            return max(end, cached)
        if cache and address is not None:
            cache.fill(address, nbytes, start_ns, end)
        return end

    def _route(self, rank: int, owner: int, write: bool, bulk: bool, cached: bool) -> tuple[tuple[Channel, ...], float]:
        """The channels of a transfer and the most that it gets of them, bytes/ns."""
        machine = self._machine
        memory = self._channel("memory", owner, owner, machine.memory_bytes_per_s * machine.memory_efficiency)
        if owner == rank:
            limit = machine.program_local_bytes_per_s
            channels = [] if cached else [memory]
            if machine.cache_bytes:
                channels.append(self._channel("cache", rank, rank, machine.cache_bytes_per_s))
        else:
            limit = machine.program_remote_bulk_bytes_per_s if bulk else machine.program_remote_bytes_per_s
            source, target = (rank, owner) if write else (owner, rank)
            pair = machine.link_peer_bytes_per_s * machine.link_efficiency
            total = machine.link_total_bytes_per_s * machine.link_efficiency
            channels = [memory]
            # A limit that another implies need not be kept.
            if pair < total:
                channels.append(self._channel("link", source, target, pair))
            if total < pair * max(1, self._world_size - 1) or pair >= total:
                channels += [self._channel("out", source, source, total), self._channel("in", target, target, total)]
        rate = min([limit / 1e9, *(channel.rate for channel in channels)])
        channels.sort(key=lambda channel: -channel.rate)
        route = self._routes[rank, owner, write, bulk, cached] = tuple(channels), rate
        return route

    def _channel(self, kind: str, rank: int, other: int, bytes_per_s: float) -> Channel:
        channel = self.channels.get((kind, rank, other))
        if channel is None:
            channel = self.channels[kind, rank, other] = Channel(bytes_per_s / 1e9, self._bucket_ns)
        return channel
