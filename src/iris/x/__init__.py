"""Device building blocks: tiles and collectives of tiles, the schedule of tiles, barriers and channels."""

from iris.x.all_gather import all_gather, shard_extent
from iris.x.all_reduce import (
    all_reduce,
    all_reduce_atomic,
    all_reduce_one_shot,
    all_reduce_ring,
    all_reduce_spinlock,
    all_reduce_two_shot,
)
from iris.x.all_to_all import all_to_all, columns_per_rank
from iris.x.broadcast import broadcast
from iris.x.context import DeviceContext
from iris.x.gather import gather
from iris.x.publish import publish_tile, sum_published, wait_tile
from iris.x.reduce_scatter import owner_of_element, reduce_scatter, reduce_scatter_owner
from iris.x.tile import (
    AllReduceConfig,
    TensorView,
    Tile,
    TileView,
    check_locks,
    make_tensor_view,
    number_of_tiles,
    offset_ptr,
    tile_layout,
    tile_ptr,
)

__all__ = [
    "AllReduceConfig",
    "DeviceContext",
    "TensorView",
    "Tile",
    "TileView",
    "all_gather",
    "all_reduce",
    "all_reduce_atomic",
    "all_reduce_one_shot",
    "all_reduce_ring",
    "all_reduce_spinlock",
    "all_reduce_two_shot",
    "all_to_all",
    "broadcast",
    "check_locks",
    "columns_per_rank",
    "gather",
    "make_tensor_view",
    "number_of_tiles",
    "offset_ptr",
    "owner_of_element",
    "publish_tile",
    "reduce_scatter",
    "reduce_scatter_owner",
    "shard_extent",
    "sum_published",
    "tile_layout",
    "tile_ptr",
    "wait_tile",
]
