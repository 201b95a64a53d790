"""Random graphs of collectives, each from one seed: what our passes merge, fuse, reorder, or must leave alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tests.graphs import Builder, aten

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
SHAPES: list[tuple[int, ...]] = [(4, 3), (8,), (4, 1, 5), (0, 3), (4, 0), (12, 2)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


class Graph:
    """Gathers, a training step, gradients scattered and added up, and tensor-parallel products."""

    def __init__(self, seed: int, group: str, ranks: int) -> None:
        self.rng, self.b, self.group, self.ranks = random.Random(seed), Builder(), group, ranks
        self.inputs: list[fx.Node] = []
        self.outputs: list[fx.Node] = []

    def build(self) -> fx.GraphModule:
        steps: list[Callable[[], None]] = [self.gathers, self.training, self.sums, self.products]
        for step in self.rng.choices(steps, [3, 2, 3, 2], k=self.rng.randint(1, 4)):
            step()
            if self.rng.random() < 0.2:  # what a step before or after it reads is written in between
                numbers = [x for x in self.inputs if x.meta["val"].dtype is not torch.bool]
                self.outputs += [self.b.call(aten.mul_.Tensor, x, 2) for x in self.rng.sample(numbers, bool(numbers))]
        self.b.output(*self.outputs)
        return self.b.module()

    def input(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        name = f"x{len(self.inputs)}"
        first = next(iter(self.b.graph.nodes), None)
        if first is None:
            self.inputs.append(self.b.placeholder(name, shape, dtype=dtype))
        else:
            with self.b.graph.inserting_before(first):
                self.inputs.append(self.b.placeholder(name, shape, dtype=dtype))
        return self.inputs[-1]

    def role(self, fsdp: str) -> dict[str, Any]:
        role = self.rng.choices([fsdp, "tp.other", None], [6, 1, 1])[0]
        return {} if role is None else {"role": role, "param_group": self.rng.choice("ab")}

    def sent(self, x: fx.Node) -> fx.Node:
        """The tensor itself, a view of it in another order, or a new one."""
        match self.rng.randint(0, 5):
            case 0 if len(x.meta["val"].shape) == 2:
                return self.b.call(aten.permute.default, x, [1, 0])
            case 1 if x.meta["val"].dtype is not torch.bool:
                return self.b.call(aten.mul.Tensor, x, 2)
        return x

    def gathers(self) -> None:
        rng, b = self.rng, self.b
        for _ in range(rng.randint(2, 5)):
            again = self.inputs and rng.random() < 0.1
            x = rng.choice(self.inputs) if again else self.input(rng.choice(SHAPES), rng.choice(DTYPES))
            made = b.all_gather(self.sent(x), group=self.group, size=self.ranks, **self.role(UNSHARD))
            self.outputs += [made.wait, *([b.wait(made.start)] if rng.random() < 0.2 else [])]

    def training(self) -> None:
        """Parameters gathered, their gradients scattered in the other order and some of them reduced."""
        rng, b, gradients = self.rng, self.b, []
        dtypes = rng.sample(DTYPES[:4], rng.choice([1, 2]))
        for _ in range(rng.randint(2, 5)):
            sent, unit = self.sent(self.input(rng.choice(SHAPES), rng.choice(dtypes))), rng.choice("ab")
            full = b.all_gather(sent, group=self.group, size=self.ranks, role=UNSHARD, param_group=unit).wait
            gradients.append((b.call(aten.mul.Tensor, full, 3), unit))
            if rng.random() < 0.5:
                self.outputs.append(full)
        for gradient, unit in reversed(gradients):
            op = rng.choice(["sum", "sum", "sum", "max", "min"])
            to, role = {"group": self.group, "op": op}, {"param_group": unit}
            made = b.reduce_scatter(gradient, size=self.ranks, role=REDUCE, **to, **role)
            if rng.random() < 0.5:
                made = b.all_reduce(made.wait, role=REPLICATE, **to, **role)
            self.outputs.append(made.wait)

    def sums(self) -> None:
        rng, b = self.rng, self.b
        dtype, shape = rng.choice([torch.float32, torch.float64]), (4 * self.ranks, rng.choice([1, 3]))
        shard = (4, shape[1])
        values = []
        for _ in range(rng.randint(2, 6)):
            x = b.call(aten.mul.Tensor, self.input(shape, dtype), 2)
            made = b.reduce_scatter(x, group=self.group, size=self.ranks, op="sum", **self.role(REDUCE))
            values.append(made.wait)
            if rng.random() < 0.2:
                self.outputs.append(made.wait)
        values += [self.input(shard, dtype) for _ in range(rng.randint(0, 2))]
        rng.shuffle(values)
        while len(values) > 1:
            scale = {"alpha": 2} if rng.random() < 0.1 else {}
            left, right = values.pop(rng.randrange(len(values))), values.pop(rng.randrange(len(values)))
            values.append(b.call(aten.add.Tensor, left, right, **scale))
        total = values[0]
        if rng.random() < 0.5:
            total = b.all_reduce(total, group=self.group, op="sum", **self.role(REPLICATE)).wait
        self.outputs.append(total)

    def products(self) -> None:
        rng, b = self.rng, self.b
        weights = [self.input((6, 4), torch.float64) for _ in range(rng.randint(1, 3))]
        down = self.input((4, 5), torch.float64)
        dim = rng.choice([0, 1])
        x = b.call(aten.mul.Tensor, self.input((2, 4, 6), torch.float64), 1)
        full = b.all_gather(x, group=self.group, size=self.ranks, role=rng.choice(["tp.in", UNSHARD])).wait
        if dim:
            full = b.cat([b.slice(full, 2 * i, 2 * i + 2) for i in range(self.ranks)], 1)
        shape = list(full.meta["val"].shape)
        flat = b.view(full, [-1, 6])
        hidden = [b.call(aten.mm.default, flat, w) for w in weights]
        self.outputs += hidden[1:] + ([full] if rng.random() < 0.3 else [])
        out = b.view(b.call(aten.mm.default, hidden[0], down), [*shape[:-1], 5])
        if dim:
            size = shape[1] // self.ranks
            out = b.cat([b.slice(out, i * size, (i + 1) * size, 1) for i in range(self.ranks)])
        self.outputs.append(b.reduce_scatter(out, group=self.group, size=self.ranks, op="sum", role="tp.out").wait)
