"""Buckets that kernels pack: how the graph looks, that every rank gets the same bits, and when plain operators stay."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity.identity import Source
from collective_identity.store import identity_of, members_of
from collective_identity.transports import is_wait, start_nodes
from inductor_passes.bucketing import Plan, bucket_collectives
from tests.graphs import Builder, aten
from tests.passes.simulated_world import bucketed
from tests.passes.test_bucketing_graphs import text

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
HALF = torch.bfloat16


def chunked(b: Builder, node: fx.Node, dim: int, ranks: int, to: int) -> fx.Node:
    """Chunks along one dimension, joined along another."""
    split = b.call(aten.split.Tensor, node, node.meta["val"].shape[dim] // ranks, dim)
    return b.cat([b.call(operator.getitem, split, i) for i in range(ranks)], to)


def packed(b: Builder, **options: Any) -> tuple[fx.GraphModule, Plan]:
    gm = b.module()
    return gm, bucketed(gm, kernels="triton", **options)


def test_gathers_with_casts_padding_and_cuts() -> None:
    """float32 shards, one padded: cast and padded by `pack`, cut by `unpack`; three nodes between inputs and use."""
    b = Builder()
    whole = b.all_gather(b.cast(b.placeholder("w0", (4, 8)), HALF), role=UNSHARD)
    uneven = b.all_gather(b.pad(b.cast(b.placeholder("w1", (2, 3)), HALF), [0, 0, 0, 1]), role=UNSHARD)
    as_it_is = b.all_gather(b.placeholder("w2", (6,), dtype=HALF), role=UNSHARD)
    cut = b.slice(uneven.wait, 0, 5)
    had = [n.meta["val"] for n in (whole.wait, cut, as_it_is.wait)]
    b.output(whole.wait, cut, as_it_is.wait)
    gm, plan = packed(b)
    assert text(gm) == [
        "placeholder()", "placeholder()", "placeholder()",
        "pack([%0, %1, %2], [32, 9, 6], [1, 1, 1], 1, torch.bfloat16)",
        "all_gather_into_tensor(%3, 2, dp)", "wait_tensor(%4)",
        "unpack(%5, [32, 9, 6], [1, 1, 1], [64, 15, 12], 2)",
        "getitem(%6, 0)", "reshape(%7, [8, 8])", "getitem(%6, 1)", "reshape(%9, [5, 3])", "getitem(%6, 2)",
        "output((%8, %10, %11))",
    ]
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    values = [n.meta["val"] for n in output.args[0]]
    assert [(v.shape, v.stride(), v.dtype) for v in values] == [(v.shape, v.stride(), v.dtype) for v in had]
    (start,) = start_nodes(gm)
    record, identity = members_of(start), identity_of(start)
    assert record is not None and [m.name for m in record.members] == [
        c.start.name for c in (whole, uneven, as_it_is)
    ]
    assert identity is not None and identity.role == UNSHARD and identity.source is Source.EXPLICIT
    assert plan.to_dict()["buckets"][0]["kernels"] and "kernels" in plan.describe()


def test_scatters_with_casts_and_padding() -> None:
    """What is scattered is interleaved by rank; the results lie in what was received and are not copied."""
    b = Builder()
    uneven = b.pad(b.cast(b.placeholder("g0", (3, 2), dtype=HALF), torch.float32), [0, 0, 0, 1])
    made = [b.reduce_scatter(gradient, role=REDUCE) for gradient in (uneven, b.placeholder("g1", (6,)))]
    b.output(*(c.wait for c in made))
    gm, _ = packed(b)
    assert text(gm) == [
        "placeholder()", "placeholder()", "pack([%0, %1], [4, 3], [1, 1], 2, torch.float32)",
        "reduce_scatter_tensor(%2, avg, 2, dp)", "wait_tensor(%3)", "split_with_sizes(%4, [4, 3], 0)",
        "getitem(%5, 0)", "reshape(%6, [2, 2])", "getitem(%5, 1)", "output((%7, %8))",
    ]


def test_shards_of_a_later_dimension() -> None:
    """FSDP2's ``Shard(1)``: chunks joined after the gather, gradients chunked before the scatter, with padding."""
    b = Builder()
    gathered = [b.all_gather(b.placeholder(f"w{i}", (4, 2)), role=UNSHARD) for i in range(2)]
    shard = b.pad(b.placeholder("uneven", (4, 1)), [0, 1])
    gathered.append(b.all_gather(shard, role=UNSHARD))
    full = [chunked(b, c.wait, 0, 2, 1) for c in gathered]
    full[2] = b.slice(full[2], 0, 3, dim=1)  # not contiguous: what it yields must stay so
    gradients = [b.reduce_scatter(chunked(b, b.pad(b.placeholder(f"g{i}", (4, 3)), [0, 1]), 1, 2, 0), role=REDUCE)
                 for i in range(2)]
    b.output(*full, *(c.wait for c in gradients))
    gm, _ = packed(b)
    lines = [line for line in text(gm) if line.startswith(("pack", "unpack", "slice", "cat", "split(", "constant"))]
    assert lines == [
        "pack([%0, %1, %2], [8, 8, 8], [1, 1, 4], 1, torch.float32)",
        "unpack(%7, [8, 8, 8], [4, 4, 4], [16, 16, 16], 2)",
        "slice(%14, 1, 0, 3)",
        "pack([%3, %4], [8, 8], [4, 4], 2, torch.float32)",
    ]


def test_reductions_over_the_replicas() -> None:
    b = Builder()
    made = [b.all_reduce(b.cast(b.placeholder(f"g{i}", s, dtype=HALF), torch.float32), role=REPLICATE)
            for i, s in enumerate([(4, 2), (6,), ()])]
    b.output(*(c.wait for c in made))
    gm, _ = packed(b)
    assert "pack([%0, %1, %2], [8, 6, 1], [1, 1, 1], 1, torch.float32)" in text(gm)
    assert not any("unpack" in line or "convert" in line for line in text(gm))


def test_what_others_need_stays() -> None:
    """A cast or padded tensor that something else uses is packed as it is, and a wait of two users unpacked whole."""
    b = Builder()
    cast = b.cast(b.placeholder("w0"), HALF)
    padded = b.pad(b.cast(b.placeholder("w1", (3, 8)), HALF), [0, 0, 0, 1])
    made = [b.all_gather(one, role=UNSHARD) for one in (cast, padded)]
    cut = b.slice(made[1].wait, 0, 6)
    b.output(made[0].wait, cut, made[1].wait, cast, padded)
    gm, _ = packed(b)
    names = [line.split("(")[0] for line in text(gm)]
    assert names.count("convert_element_type") == 2 and {"constant_pad_nd", "slice"} <= set(names)
    assert next(line for line in text(gm) if line.startswith("unpack")).endswith("[64, 64], 2)")


@pytest.mark.parametrize(
    "what", ["another value", "both ends", "two dimensions", "float64", "a step", "from the middle", "pieces swapped"]
)
def test_what_the_kernels_do_not_do_stays(what: str) -> None:
    b = Builder()
    sent = [b.placeholder(f"w{i}", (4, 4)) for i in range(2)]
    if what == "another value":
        sent[0] = b.call(aten.constant_pad_nd.default, sent[0], [0, 0, 0, 2], 1.0)
    if what == "both ends":
        sent[0] = b.pad(sent[0], [0, 0, 1, 1])
    if what == "two dimensions":
        sent[0] = b.pad(sent[0], [0, 2, 0, 2])
    if what == "float64":
        sent = [b.cast(one, torch.float64) for one in sent]
    made = [b.all_gather(one, role=UNSHARD) for one in sent]
    ends = [c.wait for c in made]
    if what == "a step":
        ends[0] = b.call(aten.slice.Tensor, ends[0], 0, 0, 8, 2)
    if what == "from the middle":
        ends[0] = b.slice(ends[0], 1, 7)
    if what == "pieces swapped":
        split = b.call(aten.split.Tensor, ends[0], 4, 0)
        ends[0] = b.cat([b.call(operator.getitem, split, i) for i in (1, 0)], 1)
    b.output(*ends)
    before = [line.split("(")[0] for line in text(b.module())]
    gm, plan = packed(b)
    after = [line.split("(")[0] for line in text(gm)]
    assert plan.buckets[0].pieces and "pack" in after
    for name in ("constant_pad_nd", "convert_element_type", "slice", "cat"):
        assert after.count(name) == before.count(name)


@pytest.mark.parametrize("where", ["between cast and gather", "between the gathers' casts", "after"])
def test_writes_between(where: str) -> None:
    """A source that is written before the bucket reads it is cast where it was; after the bucket it may be written."""
    b = Builder()
    sources = [b.placeholder(f"w{i}") for i in range(2)]
    casts = [b.cast(sources[0], HALF)]
    if where == "between the gathers' casts":
        b.call(aten.mul_.Tensor, sources[0], 2)
    casts.append(b.cast(sources[1], HALF))
    if where == "between cast and gather":
        b.call(aten.mul_.Tensor, sources[1], 2)
    made = [b.all_gather(cast, role=UNSHARD) for cast in casts]
    ends = [c.wait for c in made]
    if where == "after":
        b.call(aten.mul_.Tensor, sources[1], 2)
    b.output(*ends)
    gm, plan = packed(b)
    assert plan.buckets[0].pieces
    assert any("convert" in line for line in text(gm)) == (where != "after")


def test_plain_operators_where_kernels_cannot() -> None:
    def pieces(*dtypes: torch.dtype, device: str = "cpu", shape: tuple[int, ...] = (4, 2), **options: Any) -> bool:
        b = Builder()
        made = [b.all_gather(b.placeholder(f"w{i}", shape, dtype=d, device=device), role=UNSHARD)
                for i, d in enumerate(dtypes)]
        b.output(*(c.wait for c in made))
        (bucket,) = bucket_collectives(b.module(), **options).buckets
        return bool(bucket.pieces)

    assert pieces(HALF, HALF, kernels="triton") and pieces(torch.float8_e4m3fn, torch.float8_e4m3fn, kernels="triton")
    assert not pieces(HALF, HALF), "until a GPU has shown what they gain, torch's operators"
    assert not pieces(HALF, torch.float32, kernels="triton", mixed_dtypes=True)
    assert not pieces(torch.complex64, torch.complex64, kernels="triton")
    assert not pieces(HALF, HALF, kernels="triton", shape=(0,))
    assert not pieces(HALF, HALF, kernels="triton", coalesced=["all_gather"])
    assert not pieces(HALF, HALF, kernels="auto"), "on a CPU"
    assert pieces(HALF, HALF, kernels="auto", device="cuda:0") == torch.cuda.is_available()
    with pytest.raises(ValueError, match="expected kernels ops | triton | auto, found 'cuda'"):
        pieces(HALF, HALF, kernels="cuda")


def test_waits_are_where_they_were() -> None:
    """Two waits on one gather both become the unpacked result."""
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD) for i in range(2)]
    again = b.wait(made[0].start)
    b.output(made[0].wait, again, made[1].wait)
    gm, _ = packed(b)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    assert output.args[0][0] is output.args[0][1] and len([n for n in gm.graph.nodes if is_wait(n)]) == 1
