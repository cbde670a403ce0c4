"""``iris demo``: real sentences through a real layer, its matmuls split over the ranks.

The feed-forward block of a layer of all-MiniLM-L6-v2 runs through ``ctx.ops.all_gather_matmul`` and is compared with
float64. The rest of the model runs in plain torch on every rank. ``python -m iris.demo`` is one rank of it.
"""
