"""What joins the memories of a context's ranks, by name; choices of algorithms depend on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris import _env
from iris.runtime.local import current_world

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# interpreted: ranks without a GPU; shared: ranks that share one GPU, so that peers' memory is the own; the others by
# the hardware between the GPUs.
LINKS = ("interpreted", "shared", "nvlink", "pcie", "xgmi")


def link_of(ctx: Iris) -> str:
    """The link between the ranks of ``ctx``, one of :data:`LINKS`. Local."""
    target = ctx.target
    if not target.compiled:
        return "interpreted"
    if ctx.runtime == "loopback" or (_env.get("IRIS_RANKS_PER_GPU") or 1) > 1:
        return "shared"
    if target.vendor == "amd":
        return "xgmi"
    return "nvlink" if _nvlinks(ctx.gpu_id or 0) else "pcie"


# Bytes a second that a GPU receives: from all peers together through NVLink's switches and PCIe, from each of them
# through xGMI. Attainable ones, for estimates.
_TOGETHER = {"nvlink": 370e9, "pcie": 25e9}
_EACH = {"xgmi": 48e9}


def incoming_rate(ctx: Iris, peers: int) -> float:
    """Bytes a second that a rank can receive from so many peers at once; infinite where ranks share memory."""
    gpu = _imitating(ctx)
    if gpu is not None:
        return gpu.link_gbps * 1e9 * (peers if gpu.link_per_peer else 1)
    return rate_of(link_of(ctx), peers)


def imitated(ctx: Iris) -> str:
    """The imitated links of a rank, in words; empty where there are none."""
    gpu = _imitating(ctx)
    return "" if gpu is None else f"{gpu.link_gbps:g} GB/s{' a peer' if gpu.link_per_peer else ''}"


def _imitating(ctx: Iris) -> Any:
    gpu = getattr(current_world(), "gpu", None) if ctx.runtime == "loopback" else None
    return gpu if gpu is not None and gpu.link_gbps else None


def rate_of(link: str, peers: int) -> float:
    """Bytes a second that a rank can receive over a link from so many peers at once; infinite where ranks share
    memory."""
    return _EACH[link] * peers if link in _EACH else _TOGETHER.get(link, math.inf)


def _nvlinks(device: int) -> bool:
    """Whether NVLink joins the GPU to another; taken for granted where PyTorch cannot tell."""
    from torch._C import _distributed_c10d as c10d
    from torch._C._autograd import DeviceType

    detect: Any = getattr(c10d, "_detect_dma_connectivity", None)
    if detect is None or torch.cuda.device_count() < 2:
        return True
    return any(detect(DeviceType.CUDA, "nvlink").matrix[device])
