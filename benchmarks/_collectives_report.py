"""How bench_collectives.py shows its rows. A row is a dictionary: one candidate of an operation at one size."""

from __future__ import annotations

SAME_NAME = (("one_shot", "torch one_shot"), ("two_shot", "torch two_shot"))
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
KINDS = ("graph_us", "eager_us")


def shown(nbytes):
    unit = max((unit for unit in UNITS if nbytes % UNITS[unit] == 0), key=UNITS.__getitem__)
    return f"{nbytes // UNITS[unit]} {unit}"


def moved(operation, nbytes, world):
    """Bytes that all ranks together must read and write, None for operations that a copy does not compare with."""
    return {"all_gather": 2 * world * nbytes, "reduce_scatter": (world + 1) * nbytes}.get(operation)


def best(rows, kind, *, peer):
    """The least time of the peers or of ours, None without one."""
    return min((row[kind] for row in rows if row["peer"] == peer and kind in row), default=None)


def over_best(rows):
    """By what part ``auto`` is slower than the best variant of ours, and which that is; None when one is missing."""
    auto = [row["median_us"] for row in rows if row["variant"] == "auto"]
    others = [row for row in rows if not row["peer"] and row["variant"] != "auto"]
    if not auto or not others:
        return None
    first = min(others, key=lambda row: row["median_us"])
    return auto[0] / first["median_us"] - 1, first["name"]


def table(operation, nbytes, rows, plan, copies, cold):
    """One size as markdown.

    Args:
        rows: of the size.
        plan: what ``auto`` takes.
        copies: bytes a second that copies reach, of all ranks at once and of one alone.
        cold: whether the data of a call is gone from the cache when its turn comes again.
    """
    lines = [f"### {operation}, {shown(nbytes)}", ""]
    if not rows:
        return "\n".join([*lines, "Nothing was timed.", ""])
    calls, sets = rows[0]["calls"], rows[0]["sets"]
    where = "from memory" if cold else "may stay in the cache"
    lines += [f"{calls} calls a sample over {sets} sets of buffers: data {where}.", ""]
    bytes_moved = moved(operation, rows[0]["bytes"], rows[0]["world"])
    heads = ["candidate", "graph us", "eager us", "p50 us", "p99 us", "best peer / ours, graph", "eager", "GB/s"]
    if bytes_moved is not None:
        heads += ["of the copies of all ranks", "of one rank's copy"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["name"]]
        cells += [f"{row[kind]:.1f}" if kind in row else "-" for kind in (*KINDS, "p50_us", "p99_us")]
        for kind in KINDS:
            peer = best(rows, kind, peer=True)
            cells.append("-" if peer is None or row["peer"] or kind not in row else f"{peer / row[kind]:.2f}x")
        cells.append(f"{row['bytes'] / row['median_us'] / 1e3:.1f}")
        if bytes_moved is not None:
            cells += [f"{bytes_moved / row['median_us'] * 1e6 / copy:.0%}" for copy in copies]
        lines.append("| " + " | ".join(cells) + " |")
    how = "" if plan.config is None else f" with {plan.config}"
    text = f"auto takes {plan.algorithm}{how} ({plan.source}: {plan.reason})"
    judged = over_best(rows)
    if judged is not None:
        verdict = "within 5 %" if judged[0] <= 0.05 else "more than 5 % slower"
        text += f"; its time is {judged[0]:+.1%} from that of our best, {judged[1]}: {verdict}"
    lines += ["", text + "."]
    return "\n".join([*lines, ""])


def summary(operation, sizes):
    """In how many sizes ours is ahead, given the rows of each size."""

    def time_of(rows, name, kind):  # with the best block
        return min((row[kind] for row in rows if row["variant"] == name and kind in row), default=None)

    lines = []
    for kind in KINDS:
        contests = [
            (f"{mine} against {peer}", [(time_of(rows, mine, kind), time_of(rows, peer, kind)) for rows in sizes])
            for mine, peer in SAME_NAME
        ]
        peers = [best(rows, kind, peer=True) for rows in sizes]
        ours = [best(rows, kind, peer=False) for rows in sizes]
        auto = [time_of(rows, "auto", kind) for rows in sizes]
        contests.append(("best of ours against best peer", list(zip(ours, peers, strict=True))))
        contests.append(("auto against best peer", list(zip(auto, peers, strict=True))))
        for what, pairs in contests:
            ratios = [peer / mine for mine, peer in pairs if mine is not None and peer is not None]
            if ratios:
                lines.append(
                    f"- {what}, {kind.removesuffix('_us')}: at least as fast in {sum(r >= 1 for r in ratios)} of "
                    f"{len(ratios)} sizes, at least 1.2x in {sum(r >= 1.2 for r in ratios)}"
                )
    judged = [over[0] for over in map(over_best, sizes) if over is not None]
    if judged:
        lines.append(f"- auto within 5 % of our best: {sum(over <= 0.05 for over in judged)} of {len(judged)} sizes")
    return "\n".join([f"{operation} in short:", "", *(lines or ["- nothing to compare"]), ""])
