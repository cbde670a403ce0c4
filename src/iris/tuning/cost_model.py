"""What an operation takes on a machine, by formulas: :func:`predict`, and :func:`rank` for several configurations.

Nothing is run or simulated, so a prediction takes some tens of microseconds. Figures of machines are in
:mod:`iris._machine`, what was fitted to measurements is in :mod:`iris.tuning._calibration`. ``docs/cost-model.md`` has
the formulas, and how far predictions are off: ``benchmarks/report_cost_model.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from iris._machine import Machine, by_name
from iris.errors import ArgumentError
from iris.tuning._product import (
    Place,
    Product,
    both,
    ceil_div,
    counted,
    exchange_tiles,
    own_product,
    place_of,
    rounds_of,
    vendor_collective,
    vendor_product,
)

# Algorithms that have a model, by operation; the first is what runs when neither algorithm nor params name one.
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_gather_matmul": ("hbm_buffer", "copy_engine", "pull", "torch"),
    "matmul_all_reduce": ("two_shot", "one_shot", "torch"),
    "matmul_reduce_scatter": ("fused", "torch"),
    "matmul_all_gather": ("fused", "torch"),
    "all_gather": ("persistent", "partitioned", "copy_engine", "torch"),
    "all_reduce": ("two_shot", "one_shot", "push", "ring", "atomic", "spinlock", "torch"),
    "reduce_scatter": ("two_shot", "torch"),
    "all_to_all": ("default", "torch"),
    "broadcast": ("direct", "scatter_allgather", "torch"),
}
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
# Fields of ``FusedConfig`` and ``HbmBufferConfig`` that count here, with their defaults; a test compares the two.
DEFAULTS: dict[str, Any] = {
    "block_size_m": 256,
    "block_size_n": 64,
    "block_size_k": 64,
    "group_size_m": 1,
    "num_sms": None,
    "num_stages": 2,
    "all_reduce_variant": "two_shot",
    "k_per_flag": 8,
    "num_fetch_sms": 32,
    "num_fetch_stages": 1,
    "first_stage_fetch_sms": 256,
    "transport": "sm",
}
_STAGING = ("k_per_flag", "num_fetch_sms", "num_fetch_stages", "first_stage_fetch_sms", "staged_a_layout", "transport")

_RAMP_BYTES = 256 << 10  # at which a collective of the library has paid half of a way to a peer and back once more


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects of an operation. Times in seconds, without the host's part.

    Attributes:
        operation, algorithm: what was predicted.
        gemm: the multiplication alone by the operation's kernel; 0 for collectives.
        communication: the transfers alone, by what does them.
        fused: the operation; what ``"torch"`` takes where that is the algorithm.
        unfused: PyTorch's operations, one after the other.
        bound: what ``fused`` is mostly made of: ``"compute"``, ``"link"`` (the links' rate), ``"fetch"`` (how fast
            programs move bytes, and waits for the first of them) or ``"memory"``.
        model: whose model the time of the multiplication is: ``"iris"`` or ``"origami"``; empty for collectives.
        how: how the figures came about, in words.
    """

    operation: str
    algorithm: str
    gemm: float
    communication: float
    fused: float
    unfused: float
    bound: str
    model: str
    how: str

    @property
    def speedup(self) -> float:
        """How many times as fast as PyTorch's operations."""
        return self.unfused / self.fused

    def __str__(self) -> str:
        return (
            f"{self.operation}, {self.algorithm}: {self.fused * 1e6:.1f} us predicted, {self.unfused * 1e6:.1f} us by "
            f"PyTorch ({self.speedup:.2f}x), bound by {self.bound}: {self.how}"
        )


class Candidate(NamedTuple):
    """A configuration and what is expected of it."""

    algorithm: str
    params: Mapping[str, Any]
    prediction: Prediction


def predict(
    operation: str,
    machine: str | Machine,
    sizes: Mapping[str, int] | Iterable[tuple[str, int]],
    world: int,
    dtype: str,
    params: Mapping[str, Any] | None = None,
    *,
    algorithm: str | None = None,
    gather_dim: int = 1,
    units: int | None = None,
    link_gbps: float | None = None,
) -> Prediction:
    """What a configuration of an operation takes.

    Args:
        operation: one of :data:`ALGORITHMS`.
        machine: name of a machine, or a machine of your own.
        sizes: M, N and K of the whole product; ``bytes`` of a collective, as ``data/collectives.json`` counts them.
        world: number of ranks.
        dtype: name of the dtype of all tensors, as torch names it.
        params: fields of the configuration; those that are left out have their default. Of a collective ``comm_sms``.
        algorithm: None for the one that ``params`` are for: ``hbm_buffer`` or ``copy_engine`` where they have a field
            of ``HbmBufferConfig``, ``pull`` where they have others only, else the first of :data:`ALGORITHMS`.
        gather_dim: of all_gather_matmul: 0 for A sharded along M, 1 along K.
        units: compute units that a rank has. Where that is less than the machine has, ranks share a device, and so its
            memory's rate.
        link_gbps: GB/s that a rank receives from all peers together, in place of the machine's; ``math.inf`` where
            ranks share memory.

    Raises:
        ArgumentError: says what is not known or not possible, and what is.
    """
    place = place_of(_machine(machine), counted("world", world), dtype, units, link_gbps)
    numbers = _sizes(operation, sizes)
    params = {} if params is None else params
    taken = _algorithm(operation, algorithm, params)
    if operation in COLLECTIVES:
        return _collective(place, operation, taken, numbers[0], params)
    config = _config(params)
    if operation == "all_gather_matmul":
        if gather_dim not in (0, 1):
            raise ArgumentError(f"gather_dim must be 0 or 1, got {gather_dim!r}")
        return _gathered(place, taken, numbers, config, gather_dim)
    return _sent(place, operation, taken, numbers, config)


def rank(
    candidates: Sequence[tuple[str | None, Mapping[str, Any]]],
    operation: str,
    machine: str | Machine,
    sizes: Mapping[str, int] | Iterable[tuple[str, int]],
    world: int,
    dtype: str,
    *,
    gather_dim: int = 1,
    units: int | None = None,
    link_gbps: float | None = None,
) -> list[Candidate]:
    """Configurations, best first; equal ones stay in the order given.

    Args:
        candidates: algorithm, or None, and params of each. The others: as of :func:`predict`.
    """
    sizes = dict(sizes)
    found = []
    for algorithm, params in candidates:
        prediction = predict(
            operation, machine, sizes, world, dtype, params,
            algorithm=algorithm, gather_dim=gather_dim, units=units, link_gbps=link_gbps,
        )  # fmt: skip
        found.append(Candidate(prediction.algorithm, params, prediction))
    return sorted(found, key=lambda candidate: candidate.prediction.fused)


def product(
    machine: str | Machine,
    sizes: Mapping[str, int],
    dtype: str,
    params: Mapping[str, Any] | None = None,
    *,
    units: int | None = None,
) -> Product:
    """What a product of one rank, with no other rank in it, is made of. The arguments are those of :func:`predict`."""
    rows, columns, depth = _sizes("matmul_all_gather", sizes)
    return own_product(
        place_of(_machine(machine), 1, dtype, units, None), rows, columns, depth, 1, _config(params or {})
    )


def _machine(machine: str | Machine) -> Machine:
    return machine if isinstance(machine, Machine) else by_name(machine)


def _sizes(operation: str, sizes: Any) -> tuple[int, ...]:
    if operation not in ALGORITHMS:
        raise ArgumentError(f"operation {operation!r} has no model; possible: {', '.join(ALGORITHMS)}")
    names = ("bytes",) if operation in COLLECTIVES else ("M", "N", "K")
    given = dict(sizes)
    if set(given) != set(names):
        raise ArgumentError(f"sizes of {operation} are {', '.join(names)}; got {', '.join(map(str, given)) or 'none'}")
    return tuple(counted(name, given[name]) for name in names)


def _algorithm(operation: str, algorithm: str | None, params: Mapping[str, Any]) -> str:
    possible = ALGORITHMS[operation]
    if algorithm is None:
        if operation == "all_gather_matmul":
            if params.get("transport") == "copy_engine":
                algorithm = "copy_engine"
            elif params and not any(name in params for name in _STAGING):
                algorithm = "pull"
        algorithm = algorithm or params.get(
            "all_reduce_variant" if "all_reduce" in operation else f"{operation}_variant"
        )
    algorithm = algorithm or possible[0]
    if algorithm not in possible:
        raise ArgumentError(f"algorithm {algorithm!r} of {operation} has no model; possible: {', '.join(possible)}")
    return algorithm


def _config(params: Mapping[str, Any]) -> dict[str, Any]:
    config = {**DEFAULTS, **params}
    for name, default in DEFAULTS.items():
        if isinstance(default, int) and (name != "first_stage_fetch_sms" or config[name]):
            counted(name, config[name])
    if config["num_sms"] is not None:
        counted("num_sms", config["num_sms"])
    return config


# --- operations ------------------------------------------------------------------------------------------------------


def _gathered(place: Place, algorithm: str, sizes: tuple[int, ...], config: dict[str, Any], dim: int) -> Prediction:
    """All-gather + matmul: A comes from the peers, and tiles are multiplied as it comes."""
    (M, N, K), world, fit = sizes, place.world, place.fit
    rows = ceil_div(M, world) if dim == 0 else M
    depth = ceil_div(K, world) if dim == 1 else K
    received = rows * depth * place.itemsize * (world - 1)
    gather = vendor_collective(place, received, fit.vendor_link)
    if dim == 1 and world > 1:
        # PyTorch puts the shards' columns side by side, which reads and writes all of A.
        gather += 2 * M * K * place.itemsize / (place.memory * fit.side_by_side)
    unfused = gather + vendor_product(place, M, N, K)
    if algorithm == "torch":
        return _torch("all_gather_matmul", unfused, gather)
    product = own_product(place, rows, N, K, world if dim == 0 else 1, config)
    if world == 1:
        return _result("all_gather_matmul", algorithm, product, config, unfused)
    if algorithm == "pull":
        return _pulled(place, product, config, received * ceil_div(N, config["block_size_n"]), unfused)
    return _staged(place, algorithm, product, config, (rows, depth, K), dim, unfused)


def _pulled(place: Place, product: Product, config: dict[str, Any], nbytes: int, unfused: float) -> Prediction:
    """``pull``: each column of tiles reads A again, by loads of the programs that multiply."""
    active = min(product.programs, product.tiles)
    rate = min(place.link, active * place.fit.pull_bytes_per_s)
    pulled = nbytes / rate
    own = 1 / place.world
    fused = place.fit.kernel_s + place.fit.fused_s + both(product.compute * own, product.memory)
    fused += max(product.compute * (1 - own), pulled)
    text = f"; each column of tiles reads A: {nbytes / 1e6:.1f} MB at {rate / 1e9:.0f} GB/s"
    kind = {"link" if rate >= place.link else "fetch": pulled}
    return _result("all_gather_matmul", "pull", product, config, unfused, pulled, fused, text, **kind)


def _staged(
    place: Place,
    algorithm: str,
    product: Product,
    config: dict[str, Any],
    shard: tuple[int, int, int],
    dim: int,
    unfused: float,
) -> Prediction:
    """With a staging buffer: ``shard`` is rows and columns of a rank's A, and K."""
    rows, depth, K = shard
    world, fit, programs, tile = place.world, place.fit, product.programs, product.tile
    m, step = config["block_size_m"], config["block_size_k"]
    received = rows * depth * place.itemsize * (world - 1)
    tiles_m = ceil_div(rows, m)
    stages = min(config["num_fetch_stages"], tiles_m)
    # Seconds until bytes begin to come, for the first stage, and for all; and of programs that only fetch.
    if algorithm == "copy_engine":
        rate, groups = place.link, 1
        first, stage, fetch, lost = fit.copies_s, received / stages / rate, received / rate, 0.0
    else:
        groups = ceil_div(ceil_div(depth, step), config["k_per_flag"])
        pieces = tiles_m * groups * (world - 1)
        fetchers = min(config["num_fetch_sms"], programs, pieces)
        # Those beyond fetch the first stage only.
        more = max(fetchers, min(config["first_stage_fetch_sms"], programs, pieces))
        nbytes = min(depth, config["k_per_flag"] * step) * m * place.itemsize
        fetched = nbytes / (fit.fetch_piece_s + nbytes / fit.fetch_bytes_per_s)  # bytes a second, by one of them
        rate = min(place.link, more * fetched)
        stage = fetch = received / stages / rate
        lost = more * stage
        first = place.flag + place.remote_latency
        if stages > 1:
            rate = min(place.link, fetchers * fetched)
            fetch += received * (1 - 1 / stages) / rate
            lost += fetchers * (fetch - stage)
    remote = 1 - 1 / world if dim == 1 else 1.0  # of a tile, that needs peers
    # A program stops to look at a flag before each piece, until all have come.
    flags = groups * (world - 1) if dim == 1 else groups
    looks = flags * place.own_flag * min(1.0, (first + fetch) / product.compute)
    longer = tile * (1 + (fit.staged_loop - 1) * remote) + looks
    # Programs that fetch multiply less: as if there were so many tiles more.
    rounds = rounds_of(
        product.tiles + lost / longer, programs, ceil_div(K, step), exchange_tiles(m, config["block_size_n"], longer)
    )
    # What a program does first: its part of A comes with the first stage, the last of that in a last group.
    begins = longer * min(1.0, rounds)
    stall = first + stage + begins * remote / groups - begins
    waiting = 1.0  # share of the programs that wait for it
    if dim == 0:
        mine = product.tiles / world  # tiles of the own rows come first
        if mine >= programs:
            stall -= mine / programs * longer
        elif product.tiles > programs:
            waiting = 1 - mine / programs
    stall = max(0.0, stall) * waiting
    work = both(rounds * longer + stall, product.memory)
    arrival = first + fetch + begins * remote / groups
    waited = max(stall, arrival - work)
    text = (
        f"; {received / 1e6:.1f} MB from peers at {rate / 1e9:.0f} GB/s from {first * 1e6:.0f} us on, "
        f"{waited * 1e6:.0f} us waited for"
    )
    parts = {"fetch": lost / programs}
    parts["link" if rate >= place.link else "fetch"] = first + fetch if arrival > work else waited
    fused = fit.kernel_s + fit.fused_s + max(work, arrival)
    return _result("all_gather_matmul", algorithm, product, config, unfused, fetch, fused, text, **parts)


def _sent(place: Place, operation: str, algorithm: str, sizes: tuple[int, ...], config: dict[str, Any]) -> Prediction:
    """A product whose tiles go to the peers: partial products that owners add, or rows of the result."""
    (M, N, K), world, fit = sizes, place.world, place.fit
    whole = M * N * place.itemsize
    part = whole * (world - 1) / world
    if operation == "matmul_all_gather":
        rows, depth, owners = ceil_div(M, world), K, 1
        theirs = vendor_collective(place, part, fit.vendor_link)
    else:
        depth = ceil_div(K, world)
        rows, owners = (ceil_div(M, world), world) if operation == "matmul_reduce_scatter" else (M, 1)
        if operation == "matmul_reduce_scatter":
            theirs = vendor_collective(place, part, fit.vendor_link)
        else:
            theirs = vendor_collective(place, 2 * part, fit.vendor_reduce_link)
    unfused = theirs + vendor_product(place, rows * owners, N, depth)
    if algorithm == "torch":
        return _torch(operation, unfused, theirs)
    product = own_product(place, rows, N, depth, owners, config)
    if world == 1:
        return _result(operation, algorithm, product, config, unfused)

    # Bytes that a rank sends and receives, and those of partial products that it reads and adds.
    sent, added, meets = {
        "two_shot": (2 * part, whole, fit.two_shot_meeting),
        "one_shot": (part * world, whole * world, fit.one_shot_meeting),
        "fused": (part, part if operation == "matmul_reduce_scatter" else 0.0, 1.0),
    }[algorithm]
    active = min(product.programs, product.tiles)
    link = sent / place.link
    moved = (sent / fit.send_bytes_per_s + added / fit.add_bytes_per_s) / active
    rounds = max(1.0, product.rounds)
    # Tiles of one round end together, so the last round's are not hidden, and none are until programs are out of step.
    shown = fit.rounds_in_step if algorithm == "one_shot" else fit.rounds_exposed
    exposed = link * min(1.0, shown / rounds)
    work = both(product.compute, product.memory) + moved
    fused = fit.kernel_s + fit.fused_s * meets + max(work + exposed, link)
    text = (
        f"; {sent / 1e6:.1f} MB to peers at {place.link / 1e9:.0f} GB/s, {exposed * 1e6:.0f} of {link * 1e6:.0f} us "
        "not hidden"
    )
    shown = max(exposed, link - work)
    return _result(operation, algorithm, product, config, unfused, link, fused, text, link=shown, fetch=moved)


# Of each algorithm: start in times of collective_s, share of the links' rate, and bytes a second that a program moves;
# without bound where none moves them.
_COLLECTIVES = {
    "": lambda fit: (1.0, fit.collective_link, fit.collective_bytes_per_s),
    "partitioned": lambda fit: (1.0, fit.collective_link, fit.partitioned_bytes_per_s),
    "copy_engine": lambda fit: (fit.copy_engine_start, fit.copy_engine_link, math.inf),
    "two_shot": lambda fit: (fit.two_shot_start, fit.collective_link, fit.collective_bytes_per_s),
    "one_shot": lambda fit: (fit.one_shot_start, fit.one_shot_link, fit.collective_bytes_per_s),
    "push": lambda fit: (fit.push_start, fit.push_link, fit.collective_bytes_per_s),
    "ring": lambda fit: (fit.ring_start, fit.ring_link, fit.collective_bytes_per_s),
    "atomic": lambda fit: (fit.atomic_start, fit.atomic_link, fit.collective_bytes_per_s),
    "spinlock": lambda fit: (fit.spinlock_start, fit.spinlock_link, fit.collective_bytes_per_s),
}


def _collective(place: Place, operation: str, algorithm: str, nbytes: int, params: Mapping[str, Any]) -> Prediction:
    """A collective of the library: links or the programs' rate, and meetings."""
    world, fit = place.world, place.fit
    part = nbytes * (world - 1) / world
    theirs = vendor_collective(place, 2 * part if operation == "all_reduce" else part, fit.vendor_graph_link)
    theirs = theirs or place.machine.launch_latency_ns * 1e-9
    if algorithm == "torch":
        return _torch(operation, theirs, theirs)
    # Bytes over the busiest link of a rank, and meetings beyond those that its time between two ranks has.
    moved, meetings = part, 0
    if algorithm in ("one_shot", "push", "direct"):
        moved = part * world  # out of the root, where there is one
    elif operation == "all_reduce" or algorithm == "scatter_allgather":
        moved = 2 * part
        meetings = 2 * max(0, world - 2) if algorithm == "ring" else 0
    start, share, by_program = _COLLECTIVES.get(algorithm, _COLLECTIVES[""])(fit)
    comm_sms = params.get("comm_sms")
    programs = min(counted("comm_sms", comm_sms) if comm_sms is not None else place.units, place.units)
    wire = place.link * share
    rate = min(wire, programs * by_program)
    transfer = moved / rate
    memory = (nbytes + moved) / place.memory
    least = fit.collective_s * start + place.flag * meetings
    if algorithm == "push" and nbytes > fit.push_slot_bytes:
        least += fit.push_turns_s
    ramp = place.remote_latency * moved / (moved + _RAMP_BYTES) if moved else 0.0
    seconds = least + ramp + max(transfer, memory)
    bound = "memory" if memory > transfer else "link" if rate >= wire else "fetch"
    movers = "copies" if algorithm == "copy_engine" else f"{programs} programs"
    text = f"{moved / 1e6:.3f} MB at {rate / 1e9:.0f} GB/s by {movers}, {least * 1e6:.1f} us for meetings"
    return Prediction(operation, algorithm, 0.0, transfer, seconds, theirs, bound, "", text)


def _torch(operation: str, seconds: float, communication: float) -> Prediction:
    gemm = seconds - communication
    bound = "link" if communication > gemm else "compute"
    text = "PyTorch's operations, one after the other"
    return Prediction(
        operation, "torch", gemm, communication, seconds, seconds, bound, "iris" if gemm else "", text
    )  # fmt: skip


def _result(
    operation: str,
    algorithm: str,
    product: Product,
    config: dict[str, Any],
    unfused: float,
    communication: float = 0.0,
    fused: float | None = None,
    text: str = "",
    link: float = 0.0,
    fetch: float = 0.0,
) -> Prediction:
    """The prediction of a kernel that multiplies; one that does nothing else by default."""
    parts = {"compute": product.compute, "link": link, "fetch": fetch, "memory": product.memory}
    how = (
        f"{product.tiles} tiles of {config['block_size_m']}x{config['block_size_n']} on {product.programs} programs, "
        f"{product.rounds:.2f} rounds of {product.tile * 1e6:.1f} us{text}"
    )
    return Prediction(
        operation, algorithm, product.seconds, communication, product.seconds if fused is None else fused, unfused,
        max(parts, key=lambda name: parts[name]), product.model, how,
    )  # fmt: skip
