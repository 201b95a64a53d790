"""Inputs and outputs of a captured module are cast as FSDP2 casts them, however they are nested."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_hooks

pytestmark = pytest.mark.usefixtures("fake_world")

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    value: torch.Tensor
    flag: bool


class Seen(nn.Module):
    """Keeps what its forward was given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return args


def nested_input() -> tuple[tuple[Any, ...], dict[str, Any]]:
    single = torch.ones(2)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3)])
    args = (
        single,
        (single, [single, torch.ones(2, dtype=torch.int64)]),
        {"a": single, "b": {"c": (single,)}},
        OrderedDict(x=single.double()),
        Record(single, True),
        Pair(single, None),
        {single},
        torch.Size([2, 3]),
        packed,
        "text",
    )
    return args, {"mask": torch.ones(2, dtype=torch.bool), "scale": [single.half()]}


def described(value: Any) -> Any:
    """Types of containers and dtypes of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, Record):
        return "Record", described(value.value), value.flag
    if isinstance(value, dict):
        return type(value).__name__, {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value).__name__, [described(item) for item in value]
    return value


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        MixedPrecisionPolicy(output_dtype=torch.float16),
        MixedPrecisionPolicy(),
    ],
    ids=lambda p: f"{p.param_dtype}-{p.output_dtype}-{p.cast_forward_inputs}",
)
def test_inputs_and_outputs_are_cast_as_fsdp2_casts_them(policy: MixedPrecisionPolicy) -> None:
    found = []
    for capture in (False, True):
        model = fully_shard(Seen(), mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        if capture:
            fsdp_hooks.install(model)
        args, kwargs = nested_input()
        with torch.no_grad():
            output = model(*args, **kwargs)
        found.append((described(model.seen), described(output)))
    assert found[1] == found[0]
