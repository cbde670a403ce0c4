"""Ranks that share a GPU, as far as it can be told without one."""

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from iris.sim.loopback import carriage, waits_for_stream


def test_the_host_waits_where_values_come_to_it():
    with FakeTensorMode():
        here, there = torch.empty(4), torch.empty(4, device="cuda")
        mask = torch.empty(4, dtype=torch.bool, device="cuda")
        for name, args, waits in (
            ("copy_", (there, there), False),
            ("copy_", (there, here), True),
            ("copy_", (here, there), True),
            ("copy_", (there, 1.0), True),
            ("cpu", (there,), True),
            ("cpu", (here,), False),
            ("tensor", ([1, 2],), True),
            ("item", (there,), True),
            ("add", (there, there), False),
            ("equal", (here, there), True),
            ("as_tensor", (SimpleNamespace(__cuda_array_interface__={}),), False),
            ("__getitem__", (there, slice(0, 2)), False),
            ("__getitem__", (there, (..., 1)), False),
            ("__getitem__", (there, mask), True),
            ("__setitem__", (there, 0, 1.0), False),
            ("__setitem__", (there, slice(0, 4), mask), False),
            ("__setitem__", (there, slice(0, 4), here), True),
            ("__setitem__", (there, mask, 1.0), True),
        ):
            assert waits_for_stream(name, args) == waits, (name, args)


def test_links_by_peer_carry_at_once():
    received = {0: 48_000, 2: 96_000, 7: 48_000}
    assert carriage(received, 48.0, per_peer=False) == (1, 4000, 1)
    assert carriage(received, 48.0, per_peer=True) == (8, 2000, 0b10000101)
