"""Programs of the lite matrix: checkpoints, higher-order operators, marked regions, custom operators, collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as over_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.lite_matrix_programs import PROGRAMS, leaf, mark, plain, program

__all__ = ["PROGRAMS"]

# ---- checkpoints and higher-order operators ----


def either(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]


def scanned(x: Tensor) -> Any:
    return scan(lambda carry, row: ((carry + row).clone(), carry * row), torch.zeros(4), x, dim=0)


def mapped(x: Tensor) -> Any:
    return over_rows(lambda row: row.sin() * 2, x)


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return F.gelu(x) * 2


program("checkpoint", lambda x: checkpoint(lambda y: y.sin().exp().cos(), x, use_reentrant=False), lambda: (leaf(8),))
program(
    "checkpoint_dropout",
    lambda x: checkpoint(lambda y: F.dropout(y.sin(), 0.5).cos(), x, use_reentrant=False) * 2,
    lambda: (leaf(8, 8),),
)
program("cond", either, lambda: (plain(8),))
program("cond_gradient", either, lambda: (leaf(8),))
program(
    "while_loop",
    lambda x: while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x * 1.5 + 0.1), (torch.tensor(0), x)),
    lambda: (plain(8),),
)
program("scan", scanned, lambda: (plain(5, 4),))
program("scan_gradient", scanned, lambda: (leaf(5, 4),))
program(
    "associative_scan",
    lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
    lambda: (plain(5, 4),),
)
program("map", mapped, lambda: (plain(5, 4),))
program("map_gradient", mapped, lambda: (leaf(5, 4),))
program("nested_region", lambda x: region(region(x)), lambda: (plain(8, 8),))
program("nested_region_gradient", lambda x: region(region(x)), lambda: (leaf(8, 8),))
program(
    "flex_attention",
    lambda q: flex_attention(q, q, q, score_mod=lambda s, *_: s * s),
    lambda: (plain(1, 2, 128, 64),),
)


def marked_gelu(x: Tensor) -> Tensor:
    y = x.sin()
    with mark():
        y = F.gelu(y) * 2 + 1
    return F.gelu(y)


def marked_flex(q: Tensor) -> Tensor:
    q, k, v = q.sin(), q.cos(), q.roll(1, 2)
    with mark():
        y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.01 * (i - j))
    return y.cos()  # type: ignore[no-any-return, union-attr]


program("marked_region", marked_gelu, lambda: (leaf(8, 8),))
program("marked_flex_attention", marked_flex, lambda: (plain(1, 2, 128, 64),))

# ---- custom operators ----


@torch.library.custom_op("collective_identity_matrix::affine", mutates_args=())
def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


affine.register_fake(torch.empty_like)
affine.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("collective_identity_matrix::double_into", mutates_args=("y",))
def double_into(x: Tensor, y: Tensor) -> None:
    y.copy_(x * 2)


double_into.register_fake(lambda x, y: None)


@torch.library.custom_op("collective_identity_matrix::pair", mutates_args=())
def pair(x: Tensor) -> list[Tensor]:
    return [x * 2, x + 1]


pair.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])


def into_intermediate(x: Tensor) -> Tensor:
    y = x.cos()
    kept = y * 1
    double_into(x.sin(), y)
    return y.cos() + kept


def into_input(x: Tensor, buffer: Tensor) -> Tensor:
    double_into(x.sin(), buffer)
    return buffer + x


program("custom_operator", lambda x: affine(x.sin()).cos(), lambda: (leaf(8),))
program("custom_list", lambda x: sum(pair(x)), lambda: (plain(8),))
program("custom_into_intermediate", into_intermediate, lambda: (plain(8),))
program("custom_into_input", into_input, lambda: (plain(8), plain(8)))

# ---- collectives, of one rank ----


def group() -> Any:
    return dist.group.WORLD


program("all_reduce", lambda x: collectives.all_reduce(x * 2, "sum", group()) + x, lambda: (plain(4, 4),))
program(
    "all_gather_reduce_scatter",
    lambda x: collectives.reduce_scatter_tensor_autograd(
        collectives.all_gather_tensor_autograd(x.sin(), 0, group()), "sum", 0, group()
    ),
    lambda: (leaf(4, 4),),
)
program(
    "all_to_all",
    lambda x: collectives.all_to_all_single_autograd(x.sin(), [4], [4], group()).cos(),
    lambda: (leaf(4, 4),),
)
program("broadcast", lambda x: collectives.broadcast(x * 2, 0, group()) + 1, lambda: (plain(4),))
program(
    "coalesced_gathers",
    lambda a, b: collectives.all_gather_into_tensor_coalesced([a * 2, b.sin()], group()),
    lambda: (plain(4), plain(2, 2)),
)
