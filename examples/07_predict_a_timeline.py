"""How long an all-gather + matmul would take on GPUs, without one: a summary, and a timeline for ui.perfetto.dev.

All ranks run in this process. Times come from a cost model of the device; the results are real and are checked.

python examples/07_predict_a_timeline.py --device h200 --ranks 4 --trace timeline.json
"""

import argparse
import os

os.environ.setdefault("IRIS_RUNTIME", "sim")

import torch

import iris


def body(ctx, m: int, n: int, k: int) -> float:
    """What each rank does: the same code as on a GPU. Returns the largest error."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    generator = torch.Generator().manual_seed(0)
    whole_a = torch.randn(m, k, generator=generator).half()
    b = torch.randn(k, n, generator=generator).half()
    shard = ctx.as_symmetric(whole_a.chunk(world, dim=1)[rank].contiguous())
    out = torch.full((m, n), float("nan"), dtype=torch.float16)
    ctx.ops.all_gather_matmul(out, shard, b, algorithm="pull")
    ctx.synchronize()
    expected = whole_a.numpy().astype("float64") @ b.numpy().astype("float64")
    return abs(out.numpy() - expected).max()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="mi300x", help="the device of every rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--trace", default="timeline.json", help="where the timeline goes")
    args = parser.parse_args()

    prediction = iris.sim.predict(body, args.ranks, 128, 512, 64 * args.ranks, device=args.device, heap_size=1 << 22)
    print(prediction)
    print(f"timeline: {prediction.timeline.write(args.trace)}")
    for rank, error in enumerate(prediction.results):
        assert error < 0.05, f"rank {rank}: largest error {error:.3g}"
        print(f"rank {rank} of {args.ranks}: largest error {error:.2e}")


if __name__ == "__main__":
    main()
