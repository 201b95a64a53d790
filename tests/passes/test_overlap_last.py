"""Of the last two reductions the larger goes first, where it need not wait for the other one's products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import GRAD_REDUCE_SHARD
from inductor_passes.overlap import apply_overlap, plan_overlap
from tests.graphs import Builder

aten = torch.ops.aten


def backward(
    *, rows: int = 64, needs_it: bool = False, products: bool = True, earlier: int = 1
) -> tuple[fx.GraphModule, dict[str, Any]]:
    """A block whose weight gradient is a product, then an embedding of so many rows, whose gradient needs none."""
    b = Builder()
    x = b.placeholder("x", (16, 16))
    made: dict[str, Any] = {}
    for number in range(earlier):
        x = b.call(aten.mm.default, x, x)
        made[f"earlier {number}"] = b.reduce_scatter(x, role=GRAD_REDUCE_SHARD, param_group=f"e{number}")
    y = b.call(aten.sin.default, x)
    weight = b.call(aten.mm.default if products else aten.add.Tensor, y, x)
    of = weight if needs_it else y
    table = b.call(aten.clone.default, b.call(aten.expand.default, b.slice(of, 0, 1), [rows, 16]))
    table = b.call(aten.sin.default, table)
    made["block"] = b.reduce_scatter(weight, role=GRAD_REDUCE_SHARD, param_group="block")
    made["table"] = b.reduce_scatter(table, role=GRAD_REDUCE_SHARD, param_group="root")
    b.output(*(one.wait for one in made.values()))
    made["product"] = weight
    return b.module(), made


def planned(**given: Any) -> tuple[list[str], bool]:
    """What starts in which order, and whether the table's reduction starts before the block's product."""
    gm, made = backward(**given)
    before = [node.name for node in gm.graph.nodes]
    apply_overlap(gm, plan_overlap(gm, ahead=1))
    gm.graph.lint()
    assert sorted(before) == sorted(node.name for node in gm.graph.nodes)
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    order = sorted((name for name in made if name != "product"), key=lambda name: at[made[name].start])
    return order, at[made["table"].start] < at[made["product"]]


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_the_larger_starts_before_the_others_products(earlier: int) -> None:
    order, first = planned(earlier=earlier)
    assert order == [*(f"earlier {number}" for number in range(earlier)), "table", "block"] and first


@pytest.mark.parametrize(
    "given", [{"rows": 8}, {"rows": 16}, {"needs_it": True}, {"products": False}], ids=lambda one: next(iter(one))
)
def test_else_each_starts_where_its_gradient_is(given: dict[str, Any]) -> None:
    assert planned(**given) == (["earlier 0", "block", "table"], False)


def test_a_graph_that_says_no_sizes_keeps_its_order() -> None:
    gm, made = backward()
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    apply_overlap(gm, plan_overlap(gm, ahead=1))
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    assert at[made["block"].start] < at[made["table"].start]


def test_what_the_table_needs_is_computed_before_too() -> None:
    gm, made = backward()
    apply_overlap(gm, plan_overlap(gm, ahead=1))
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    needed, todo = set(), [made["table"].start]
    while todo:
        for node in todo.pop().all_input_nodes:
            needed.add(node)
            todo.append(node)
    assert all(at[node] < at[made["product"]] for node in needed)
    assert at[made["table"].wait] > at[made["product"]], "not waited for until the block's gradient is packed"
