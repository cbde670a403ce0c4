"""One rank of the demo: ``python -m iris.demo``, or on several ranks ``iris run -n 4 -m iris.demo``."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import iris
from iris.demo import inputs, report
from iris.demo.model import Model, closest_pair, tokenize
from iris.demo.split import Measured, matmul
from iris.errors import IrisError

# The shards of the longest input allowed, in float32 on one rank, are 16 MiB.
_HEAP_BYTES = 64 << 20


def main(arguments: list[str]) -> int:
    """Run the demo.

    Returns:
        0 when every rank's results match float64, 1 when not, 2 when the input cannot be used.
    """
    options = inputs.parse(arguments)
    ctx = iris.iris(_HEAP_BYTES)
    problem = ""
    try:
        inputs.check(options)
    except IrisError as error:
        problem = str(error)
    # Together, because a rank that ends ends the others, rank 0 perhaps before it has said why.
    problems = [text for text in ctx.exchange.all_gather("iris.demo: checking the input", problem) if text]
    if problems:
        if ctx.cur_rank == 0:
            print(f"iris demo: {problems[0]}", file=sys.stderr, flush=True)
        ctx.barrier()
        return 2
    return run(ctx, options)


def run(ctx: iris.Iris, options: inputs.Options) -> int:
    """Both matmuls of the block, the table, the verdict. Collective. The exit code is returned."""
    folder, sentences = inputs.check(options)
    tokens = tokenize(folder, sentences)
    out = report.console() if ctx.cur_rank == 0 else None
    if out:
        report.show_input(out, tokens)
        out.print(f"layer {options.layer}: its attention and what comes before it, in plain torch ...")
    model = Model(folder, ctx.get_device())
    x = model.feed_forward_input(tokens, options.layer)

    measured: list[Measured] = []

    def linear(name: str, a: torch.Tensor) -> torch.Tensor:
        if out:
            out.print(f"{name}: all_gather_matmul in {options.dtype}, two calls ...")
        weight, bias = (model.weight(options.layer, f"{name}.dense.{part}") for part in ("weight", "bias"))
        result, numbers = matmul(ctx, name, a, weight, bias, getattr(torch, options.dtype), options.algorithm)
        measured.append(numbers)
        return result.float()

    inner = F.gelu(linear("intermediate", x))
    y = model.finish(linear("output", inner), x, options.layer)
    if out:
        pair = closest_pair(model.sentence_vectors(y, tokens, options.layer))
        closest = {"first": sentences[pair[0]], "second": sentences[pair[1]], "cosine": pair[2]} if pair else None
        if options.json is not None:
            report.write(options.json, ctx, options, tokens, measured, closest)
        report.show(out, measured, closest, interpreted=not ctx.target.compiled)
    # Rank 0 has printed when the first rank ends: one that ends with an error makes the launcher end the others.
    ctx.barrier()
    return 0 if all(numbers.passed for numbers in measured) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
