"""What the demo prints and writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from iris.demo.inputs import MAX_SENTENCE_TOKENS, MAX_TOKENS, Options
from iris.demo.model import Tokens
from iris.demo.split import TOLERANCE, Check, Measured

if TYPE_CHECKING:
    from iris.runtime.context import Iris


def console() -> Console:
    """The console of rank 0. Lines of text are left whole, for terminals to wrap and for programs to read."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def show_input(out: Console, tokens: Tokens) -> None:
    """Say what goes into the layer, and what was left out of it."""
    out.print(f"{len(tokens.ids)} sentences, {tokens.count} tokens")
    if tokens.truncated:
        out.print(f"  {tokens.truncated} of them cut off after {MAX_SENTENCE_TOKENS} tokens, as the model was trained")
    if tokens.left_out:
        out.print(f"  the last {tokens.left_out} sentences are left out: the demo takes up to {MAX_TOKENS} tokens")


def show(out: Console, matmuls: Sequence[Measured], closest: dict[str, Any] | None, *, interpreted: bool) -> None:
    """Print the table of all ranks, what explains it, and last the verdict."""
    # 80 columns hold it.
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("matmul", "rank", "A shard", "B", "out", "plan", "1st ms", "2nd ms", "error", "allowed"):
        table.add_column(name, justify="left" if name in ("matmul", "plan") else "right", overflow="fold")
    for matmul in matmuls:
        for share in matmul.ranks:
            table.add_row(
                matmul.name if share.rank == 0 else "",
                str(share.rank),
                *("x".join(map(str, shape)) for shape in (share.a, share.b, share.out)),
                matmul.plan.algorithm,
                *(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (share.first_ms, share.warm_ms)),
                f"{share.check.error:.1e}",
                f"{share.check.allowed:.1e}",
                end_section=share is matmul.ranks[-1],
            )
    out.print("\nFeed-forward block: out = all_gather(A) @ B + bias\n")
    # Unlike text, a table is made for the width of the terminal.
    out.print(table, soft_wrap=False)
    for matmul in matmuls:
        out.print(f"{matmul.name}: {matmul.plan.algorithm} ({matmul.plan.source}): {matmul.plan.reason}")
        if matmul.padding:
            s = "s" * (matmul.padding > 1)
            out.print(
                f"  {len(matmul.ranks)} ranks do not divide K={matmul.K}: A got {matmul.padding} column{s} and B "
                f"{matmul.padding} row{s} of zeros"
            )
    if interpreted:
        out.print("times: kernels are interpreted on this machine, so they say nothing about speed")
    out.print("B: the transposed view of the weight, (outputs, inputs) as the model stores it")
    out.print("error: absolute difference from float64, of the element that is closest to what it is allowed")
    out.print(f"allowed: {TOLERANCE}")
    if closest:
        out.print(
            f"closest in meaning (cosine {closest['cosine']:.2f}): {closest['first']!r} and {closest['second']!r}"
        )
    out.print(f"\n{verdict(matmuls)}")


def worst(matmuls: Sequence[Measured]) -> Check:
    """The check, of all ranks and matmuls, that comes closest to what is allowed or exceeds it most."""
    return max((share.check for matmul in matmuls for share in matmul.ranks), key=lambda check: check.severity)


def verdict(matmuls: Sequence[Measured]) -> str:
    """The last line: whether every rank's results match float64, with the numbers of the worst check."""
    answer = "yes" if all(matmul.passed for matmul in matmuls) else "no"
    check, ranks = worst(matmuls), len(matmuls[0].ranks)
    return (
        f"all_gather_matmul on {ranks} rank{'s' * (ranks > 1)} matches float64: {answer} "
        f"(largest error {check.error:.1e}, allowed {check.allowed:.1e})"
    )


def write(
    path: Path, ctx: Iris, options: Options, tokens: Tokens, matmuls: Sequence[Measured], closest: dict[str, Any] | None
) -> None:
    """Write the numbers as JSON."""
    numbers = {
        "operation": "all_gather_matmul",
        "ranks": ctx.num_ranks,
        "runtime": ctx.runtime,
        "device": ctx.device,
        "interpreted": not ctx.target.compiled,
        "dtype": options.dtype,
        "layer": options.layer,
        "sentences": len(tokens.ids),
        "tokens": tokens.count,
        "sentences_truncated": tokens.truncated,
        "sentences_left_out": tokens.left_out,
        "matches": all(matmul.passed for matmul in matmuls),
        "tolerance": TOLERANCE,
        "matmuls": [_matmul(matmul) for matmul in matmuls],
        "closest_sentences": closest,
    }
    path.write_text(json.dumps(numbers, indent=2, allow_nan=False) + "\n")


def _matmul(matmul: Measured) -> dict[str, Any]:
    plan = matmul.plan
    return {
        "name": matmul.name,
        "K": matmul.K,
        "K_padding": matmul.padding,
        "plan": {"algorithm": plan.algorithm, "source": plan.source, "reason": plan.reason},
        "matches": matmul.passed,
        "ranks": [
            {
                **{name: value for name, value in asdict(share).items() if name != "check"},
                # JSON has no NaN.
                **{name: value if math.isfinite(value) else None for name, value in asdict(share.check).items()},
                "matches": share.check.passed,
            }
            for share in matmul.ranks
        ],
    }
