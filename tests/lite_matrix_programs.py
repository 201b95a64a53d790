"""Programs of the lite matrix: models, tensors, random numbers, mutation, shapes.

``PROGRAMS`` has them by name; tests/lite_matrix_operators.py adds higher-order and custom operators and collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Dense, Shape
from tests.distributed.lite_runs import CLASSES, Sparse
from tests.lite_matrix import Make, Program

PROGRAMS: dict[str, Make] = {}
SCALARS = {"capture_scalar_outputs": True}
SIZES = {"capture_dynamic_output_shape_ops": True}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that need their gradient."""
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def plain(*shape: int) -> Tensor:
    """Random numbers without gradient."""
    return torch.randn(*shape)


def mark() -> Any:
    """A region marked for compilation."""
    return fx_traceback.annotate({"compile_with_inductor": 0})


def program(name: str, run: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]], **more: Any) -> None:
    """Add a program that needs no model."""
    assert name not in PROGRAMS
    PROGRAMS[name] = lambda: Program(run, inputs(), **more)


def modelled(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], **more: Any
) -> None:
    """Add a program that is a model."""

    def make() -> Program:
        model = build()
        return Program(model, inputs(), model, **more)

    PROGRAMS[name] = make


# ---- models ----


def language_model(build: Callable[[], nn.Module], dtype: torch.dtype) -> Make:
    def make() -> Program:
        model = build().to(dtype)
        tokens = torch.randint(0, CLASSES, (2, 16))

        def run(tokens: Tensor) -> Any:
            scores = model(tokens)
            return F.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten()), scores

        return Program(run, (tokens,), model)

    return make


def dense() -> nn.Module:
    return Dense(Shape(vocabulary=CLASSES, width=32, heads=4, layers=2))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))


PROGRAMS["llama"] = language_model(dense, torch.float32)
PROGRAMS["llama_bfloat16"] = language_model(dense, torch.bfloat16)
PROGRAMS["moe"] = language_model(Sparse, torch.float32)
PROGRAMS["moe_bfloat16"] = language_model(Sparse, torch.bfloat16)
modelled("convolution_batch_norm", convolutions, lambda: (leaf(2, 3, 10, 10),))
modelled("convolution", lambda: nn.Conv2d(3, 8, 3), lambda: (leaf(2, 3, 12, 12),))
modelled(
    "convolution_channels_last",
    lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    lambda: (leaf(2, 4, 8, 8),),
)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]  # type: ignore[no-any-return]


class MixedPrecision(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.gelu(super().forward(x)).float().softmax(-1)


modelled("lstm", lambda: Recurrent(4, 8), lambda: (leaf(5, 2, 4),), dynamo={"allow_rnn": True})
modelled("autocast", lambda: MixedPrecision(8, 8), lambda: (leaf(4, 8),))


def optimizer_step() -> Program:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    def run(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return Program(run, (plain(4, 8),), model, whole=False)


PROGRAMS["optimizer_step"] = optimizer_step

# ---- tensors ----

program("norm_softmax_gelu", lambda x: F.gelu(F.layer_norm(x, (64,))).softmax(-1), lambda: (leaf(8, 64),))
program("equal_operators", lambda x: (x.sin() * x.sin()).cos() + x.sin(), lambda: (leaf(16, 16),))
program(
    "addmm_float64",
    lambda a, b, c: torch.addmm(c, a, b, beta=0.3, alpha=0.7),
    lambda: tuple(leaf(8, 8, dtype=torch.float64) for _ in range(3)),
)
program(
    "complex",
    lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones(4), torch.arange(4.0))),
    lambda: (leaf(4, 2),),
)
program("fft", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), lambda: (leaf(16),))
program(
    "masked_attention",
    lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
    lambda: (leaf(1, 2, 8, 8), torch.ones(8, 8, dtype=torch.bool).tril()),
)
program("eigenvalues", lambda x: torch.linalg.eigh(x @ x.t()), lambda: (plain(6, 6),))
program("order_of_ties", lambda x: (x.sort(0)[1], x.topk(2)[1], x.argmax()), lambda: (torch.tensor([1.0, 1, 0, 1]),))
program(
    "index_put_scatter",
    lambda x, i: x.index_put((i,), torch.ones(3, 4), accumulate=True).scatter_add(
        0, torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4)
    ),
    lambda: (leaf(8, 4), torch.tensor([1, 1, 2])),
)
program(
    "embedding_bag",
    lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 2])),
    lambda: (leaf(10, 4), torch.tensor([1, 2, 3, 4])),
)
program("foreach", lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2), lambda: (plain(8), plain(8)))
if torch.__version__ >= "2.13":  # torch 2.11 has no fake kernel for it, so no backend traces it
    program("quantized", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), lambda: (plain(8),))
program("sparse", lambda x: torch.sparse.mm(x.to_sparse(), x), lambda: (plain(4, 4),), whole=False)
program("device_copies", lambda x: x.half().cpu().to("cpu", copy=True).float() * 2, lambda: (plain(4, 4),))
program("view_outputs", lambda x: (x.view(-1), x.t(), (x * 2).view(16)), lambda: (leaf(4, 4),))

# ---- random numbers ----

program("dropout", lambda x: F.dropout(x, 0.5) * 2, lambda: (leaf(64, 64),))
program(
    "random_factories",
    lambda x: x * torch.rand_like(x) + torch.randn(4, 4) + torch.randint(0, 5, (4, 4)),
    lambda: (leaf(4, 4),),
)
program(
    "permutation",
    lambda x: x[torch.randperm(8)] * torch.bernoulli(torch.full((8, 8), 0.3)),
    lambda: (leaf(8, 8),),
)


def marked_random(x: Tensor) -> Tensor:
    with mark():
        y = x * torch.rand_like(x)
    return y + torch.rand_like(x)


program("marked_random", marked_random, lambda: (leaf(16),))

# ---- mutation ----


def mutate_input(x: Tensor) -> Tensor:
    x.add_(1)
    x[0].mul_(2)
    return x * 3


def mutate_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.copy_(buffer * 0.9 + x.detach() * 0.1)
    return x * buffer.sum()


def mutate_intermediate(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3] = 7
    return y.relu_().sum(0)


program("mutate_input", mutate_input, lambda: (plain(4, 4),))
program("mutate_buffer", mutate_buffer, lambda: (leaf(4, 4), plain(4, 4)))
program("mutate_intermediate", mutate_intermediate, lambda: (leaf(4, 4),))

# ---- shapes ----


def rows(x: Tensor) -> Tensor:
    return (x.view(x.shape[0] // 2, -1) * x.shape[0]).sum(-1) + torch.arange(x.shape[0] // 2)


def factories(x: Tensor) -> Any:
    made = torch.zeros(x.shape[0], x.shape[1] * 2) + torch.full((x.shape[0], 1), x.shape[0])
    return made, x.new_empty(x.shape[0]).fill_(1), F.pad(x, (0, 1))


def size_from_data(x: Tensor) -> Tensor:
    count = x.sum().item()
    torch._check(count >= 0)
    torch._check(count < 100)
    return torch.zeros(count) + 1  # type: ignore[arg-type]


def checked_scalar(x: Tensor) -> Tensor:
    count = x.sum().item()
    torch._check(count > 3)
    return torch.ones(4) * count


def split_by_data(x: Tensor, sizes: Tensor) -> list[Tensor]:
    found = sizes.tolist()
    for size in found:
        torch._check(size >= 0)
        torch._check(size <= x.shape[0])
    return [part * 2 for part in torch.split(x, found)]


def selected(x: Tensor) -> Any:
    y = x.masked_select(x > 0)
    return y.sin() * 2, y.shape[0] * x


program("dynamic_rows", rows, lambda: (leaf(8, 4),), dynamic=True)
program("dynamic_factories", factories, lambda: (leaf(7, 4),), dynamic=True)
program("size_from_data", size_from_data, lambda: (torch.tensor([1, 2, 3]),), dynamo=SCALARS)
program("checked_scalar", checked_scalar, lambda: (torch.tensor([1, 2, 3]),), dynamo=SCALARS)
program("scalar_from_data", lambda x, s: x * s.item() + 1, lambda: (plain(6), torch.tensor(2.5)), dynamo=SCALARS)
program("split_by_data", split_by_data, lambda: (plain(6, 4), torch.tensor([2, 4])), dynamo=SCALARS)
program(
    "nonzero",
    lambda x: ((x[x.nonzero().squeeze(-1)] * 2).sum(), x.nonzero().float() * 3),
    lambda: (torch.tensor([1.0, 0, 3]),),
    dynamo=SIZES,
)
program("masked_select", selected, lambda: (plain(16),), dynamo=SIZES)
