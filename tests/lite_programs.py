"""Random programs in lite mode against ``aot_eager``, bit for bit.

``python -m tests.lite_programs --programs 1000 --seed 0``: views, mutation of inputs and intermediates, dropout,
mixed dtypes, dynamic shapes, collectives (a one-rank gloo group). Programs are compiled in bundles, which shares the
cost of a compile; a bundle that differs or raises is run one by one, and the seed of each program that does is printed.
Every third bundle is compiled for any number of rows and run with two. Most programs are short, as a second run of
the same steps in other company finds less than a new program.

``aot_eager`` has two faults of torch's own. With the merging of equal operators it takes two draws of ``randn_like``
for one until torch 2.14 (docs/upstream/cse-random-like.md). Without it, more often than with it, the gradient of a
copied buffer that is mutated later uses the mutated values (docs/upstream/mutated-buffer.md). So a program is compared
without merging, and if it mutates its buffer and differs, with it, and then with eager.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

import collective_identity as ci
import inductor_passes  # noqa: F401  (makes the backend known)

BUNDLE = 5  # of 25 a program takes four times as long
LENGTHS = (1, 1, 2, 2, 2, 3, 3, 6)
MUTATING = "mutate_input"
ROWS, COLUMNS = 4, 6
Step = Callable[[Tensor, Tensor, Any], Tensor]


def _inplace(x: Tensor, other: Tensor, number: Any) -> Tensor:
    y = x.clone()
    y[:, 1:3] = number
    y[0].mul_(2)
    return y.relu_() + other


def _mutate_input(x: Tensor, other: Tensor, number: Any) -> Tensor:
    other.mul_(0.5).add_(x.detach().mean())
    return x + other


def _reduce(x: Tensor, other: Tensor, number: Any) -> Tensor:
    return collectives.all_reduce(x * number, "sum", dist.group.WORLD) + x


def _gather(x: Tensor, other: Tensor, number: Any) -> Tensor:
    return collectives.all_gather_tensor_autograd(x.sin().contiguous(), 0, dist.group.WORLD)[: x.shape[0]] + other


STEPS: dict[str, Step] = {
    "gelu": lambda x, o, n: F.gelu(x) * n,
    "silu_mul": lambda x, o, n: F.silu(x) * o,
    "softmax": lambda x, o, n: x.softmax(-1) + n,
    "layer_norm": lambda x, o, n: F.layer_norm(x, (x.shape[-1],)) * o,
    "matmul": lambda x, o, n: (x @ o.t()) @ o,
    "dropout": lambda x, o, n: F.dropout(x, 0.5) + o,
    "random": lambda x, o, n: x * torch.rand_like(x) + torch.randn_like(o),
    "noise": lambda x, o, n: x + n * torch.randn(x.shape[-1]),
    "bfloat16": lambda x, o, n: (x.bfloat16() * o.bfloat16()).float() + n,
    "float64": lambda x, o, n: (x.double() / (o.double().abs() + 1)).float(),
    "views": lambda x, o, n: x.t().contiguous().view(-1).view(x.shape[1], x.shape[0]).t() + o,
    "split": lambda x, o, n: torch.cat([part * n for part in x.chunk(2, -1)][::-1], -1),
    "slice_pad": lambda x, o, n: F.pad(x[:, 1:], (0, 1)) + o,
    "expand": lambda x, o, n: x + o.sum(0, keepdim=True).expand_as(x),
    "index": lambda x, o, n: x.index_select(0, torch.arange(x.shape[0]).flip(0)) * o,
    "scatter": lambda x, o, n: x.scatter_add(0, torch.zeros(1, COLUMNS, dtype=torch.long), torch.ones(1, COLUMNS)),
    "where": lambda x, o, n: torch.where(x > o, x, o * n),
    "cumulate": lambda x, o, n: x.cumsum(0).tanh() + x.amax(-1, keepdim=True),
    "sizes": lambda x, o, n: x * x.shape[0] + torch.arange(x.shape[1]),
    "inplace": _inplace,
    "mutate_input": _mutate_input,
    "all_reduce": _reduce,
    "all_gather": _gather,
}


@dataclass(frozen=True, slots=True)
class Program:
    """Some steps, chosen by a seed; its inputs follow from the seed as well."""

    seed: int

    @property
    def bundle(self) -> int:
        """Programs of one bundle are compiled together."""
        return self.seed // BUNDLE

    @property
    def dynamic(self) -> bool:
        """Compiled for any number of rows, and run with two; the others for one size."""
        return self.bundle % 3 == 0

    def steps(self) -> list[tuple[str, float]]:
        """Names and numbers, in order."""
        choose = random.Random(self.seed)
        length = choose.choice(LENGTHS)
        return [(choose.choice(sorted(STEPS)), choose.choice([0.5, 1.0, 3.0])) for _ in range(length)]

    @property
    def mutates(self) -> bool:
        """Whether a step writes into the buffer."""
        return any(name == MUTATING for name, _ in self.steps())

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """A leaf that needs its gradient, and a buffer that may be mutated; float32 ``[rows, COLUMNS]``."""
        made = torch.Generator().manual_seed(self.seed)
        first, second = (torch.randn(rows, COLUMNS, generator=made) for _ in range(2))
        if self.dynamic:
            for one in (first, second):
                torch._dynamo.mark_dynamic(one, 0)
        return first.requires_grad_(), second


def results(programs: Sequence[Program], rows: int, **how: Any) -> list[list[Tensor]]:
    """Outputs, gradient and buffer of each program of one bundle, compiled together as ``how`` says, and a next draw.

    Dynamic ones run again with one row more, a size that was not seen when compiling.
    """
    torch._dynamo.reset()
    dynamic = programs[0].dynamic
    # Dynamo should not trace the random choice. Autograd may have saved a buffer before a later step writes into it:
    # then only that step gets the buffer itself.
    plans = [
        [(STEPS[name], number, program.mutates and name != MUTATING) for name, number in program.steps()]
        for program in programs
    ]

    def bundle(inputs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []
        for plan, (x, other) in zip(plans, inputs, strict=True):
            y = x
            for step, number, copied in plan:
                y = step(y, other.clone() if copied else other, number)
            found.append((y, x.t()))
        return found

    compiled = torch.compile(bundle, dynamic=None if dynamic else False, fullgraph=True, **how)
    collected: list[list[Tensor]] = [[] for _ in programs]
    for size in (rows, rows + 1) if dynamic else (rows,):
        inputs = [program.inputs(size) for program in programs]
        torch.manual_seed(7)
        outputs = compiled(inputs)
        torch.stack([y.sum() for y, _ in outputs]).sum().backward()
        drawn_next = torch.rand(1)  # another number if something drew too often, or not at all
        for at, ((x, other), found) in enumerate(zip(inputs, outputs, strict=True)):
            assert x.grad is not None
            collected[at] += [one.detach().clone() for one in (*found, x.grad, other, drawn_next)]
    return collected


def differing(programs: Sequence[Program], **lite: Any) -> list[Program]:
    """The programs whose results in lite mode are not those of ``aot_eager``, bit for bit."""
    found = results(programs, ROWS, **lite)
    wrong = _unlike(programs, found, merging=False)
    mutating = [p for p in wrong if p.mutates]
    if not mutating:
        return wrong
    again = _unlike(programs, found, merging=True)
    if set(again) & set(mutating):
        again = _unlike(programs, found, merging=True, backend="eager")
    return [p for p in wrong if p not in mutating or p in again]


def _unlike(
    programs: Sequence[Program], found: list[list[Tensor]], *, merging: bool, backend: str = "aot_eager"
) -> list[Program]:
    with functorch_config.patch(cse=merging):  # type: ignore[attr-defined]
        expected = results(programs, ROWS, backend=backend)
    return [
        program
        for program, was, now in zip(programs, expected, found, strict=True)
        if not all(_equal(a, b) for a, b in zip(was, now, strict=True))
    ]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(), b.nan_to_num())


@contextmanager
def world() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bundles(count: int, seed: int) -> Iterator[list[Program]]:
    """``count`` programs from ``seed`` on, as they are compiled."""
    for _, group in itertools.groupby(map(Program, range(seed, seed + count)), lambda program: program.bundle):
        yield list(group)


def wrong_of(bundle: Sequence[Program], **lite: Any) -> Iterator[str]:
    """What is wrong with programs of one bundle, a line each, with the command that repeats it.

    Each is run alone as well; one that is wrong in company only is named with its bundle.
    """
    together = _wrong(bundle, **lite)
    alone = {} if not together else {p: said for one in bundle for p, said in _wrong([one], **lite).items()}
    for program, said in (alone or together).items():
        first, count = (program.seed, 1) if alone else (bundle[0].seed, len(bundle))
        yield f"{said}: python -m tests.lite_programs --programs {count} --seed {first}: {program.steps()}"


def _wrong(programs: Sequence[Program], **lite: Any) -> dict[Program, str]:
    """What is wrong with each, compiled together; one that raises must not end the run."""
    try:
        return dict.fromkeys(differing(programs, **lite), "differs")
    except Exception as error:
        said = f"raises {type(error).__name__}: {error}".split("\n")[0]
        return dict.fromkeys(programs, said)


def main() -> int:
    """Compare, print, and fail on any that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no bundle after so many")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start, compared, wrong = time.monotonic(), 0, 0
    with world(), ci.enable(agreement_timeout=0):
        how: dict[str, Any] = {"backend": "collective_identity", "options": {"strict_lite": True}}
        for group in bundles(given.programs, given.seed):
            if time.monotonic() - start > given.seconds:
                break
            for line in wrong_of(group, **how):
                wrong += 1
                print(line, flush=True)
            compared += len(group)
    print(f"{compared} programs from seed {given.seed}: {wrong} differ from aot_eager or raise")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
