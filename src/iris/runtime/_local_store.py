"""The key-value store of ``torch.distributed`` for ranks of one process; a wait for a key lets the other ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from iris.runtime._local_exchange import Host


class LocalStore(dist.HashStore):
    """A ``HashStore`` that all ranks share. Time limits are the world's, not the store's.

    A ``PrefixStore`` over it works, but a wait through one happens in C++, where the thread cannot be handed to another
    rank: if the key is not there it raises ``DistStoreError`` at once.
    """

    def __init__(self, host: Host):
        super().__init__()
        self._host = host
        super().set_timeout(timedelta(milliseconds=1))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return super().multi_get(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> Any:
        if not self.check(list(keys)):
            why = f"keys {list(keys)} of the store of torch.distributed"
            self._host.wait_until(lambda: self.check(list(keys)), why)

    def set_timeout(self, timeout: timedelta) -> Any:
        """Accepted and not used."""
