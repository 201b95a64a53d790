"""An exception in an installed forward leaves nothing behind: outside it, reading gives the shard again."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdp_hooks
from tests.unit.sharded import sharded


def test_an_exception_closes_the_unit(fake_world: int) -> None:
    model = fsdp_hooks.install(sharded())
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))  # eight features are needed
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0][0].weight, DTensor)
    assert model(torch.ones(2, 8)).shape == (2, 8)
