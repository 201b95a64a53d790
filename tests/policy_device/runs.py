"""Everything that needs the second device, in one process: ``python -m tests.policy_device.runs`` prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.policy_case import aten, backend, policy, wrong
from benchmarks.policy_graph import Tables, install, mixed
from inductor_passes.device_policy import OperatorPolicy, register_policy

from . import NAME

x, y = torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8)


def sequence() -> list[str]:
    """A, B, none, A, the same function."""
    return [f"{one}: {bad}" for one in ("A", "B", "none", "A") for bad in wrong(compiled(mixed, one), one, NAME)]


def registered() -> list[str]:
    """The same with plain torch.compile."""
    bad = []
    plain = torch.compile(mixed, fullgraph=True)
    for one in ("A", "B", "none", "A"):
        made = policy(one, NAME)
        if made is None:
            bad += wrong(plain, one, NAME)
        else:
            with register_policy(NAME, made):
                bad += wrong(plain, one, NAME)
    return bad


def composed() -> list[str]:
    """Under the collective_identity backend."""
    call = torch.compile(mixed, backend="collective_identity", options={"policy": policy("A", NAME)}, fullgraph=True)
    return wrong(call, "A", NAME)


def compiled(function: Callable[..., Any], name: str, **more: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend(name, NAME), fullgraph=True, **more)


def kernels() -> list[str]:
    """CPU nodes keep stock kernels; the device's fallbacks are extern calls."""
    from torch._inductor.utils import run_and_get_code

    def call(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.sin(a), torch.sin(b)

    device = torch.linspace(-1, 1, 8).to(NAME)
    _, stock = run_and_get_code(compiled(call, "none"), device, y)
    _, ours = run_and_get_code(compiled(call, "A"), device, y)
    counts = ["\n".join(code).count("torch.ops.aten.sin.default(") for code in (stock, ours)]
    return [] if counts == [0, 1] else [f"calls of eager sin without and with the policy: {counts}"]


def nested() -> list[str]:
    """A nested compile region, called on both devices."""

    @torch.compiler.nested_compile_region
    def inner(a: torch.Tensor) -> torch.Tensor:
        return F.relu(a) * 1

    out = compiled(lambda a, b: (inner(a) + inner(a), inner(b)), "A")(x.to(NAME), y)
    return close(out, (2 * (F.relu(x) + 100), F.relu(y)))


def cond() -> list[str]:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cond(b.sum() > 0, lambda a: F.relu(a), lambda a: F.relu(a) + 1, (a,))

    made = compiled(call, "A")
    bad = close((made(x.to(NAME), y + 1),), (F.relu(x) + 100,))
    return bad + close((made(x.to(NAME), y - 1),), (F.relu(x) + 101,))


def dynamic() -> list[str]:
    made = compiled(lambda a: F.relu(a) * 1, "A", dynamic=True)
    return [bad for size in (4, 9) for bad in close((made(torch.ones(size).to(NAME)),), (torch.full((size,), 101.0),))]


def strided() -> list[str]:
    """Fallbacks with several outputs on transposed inputs: right numbers and eager's strides."""
    made = OperatorPolicy(
        "strided", "1", NAME,
        remove_decompositions=[aten.native_layer_norm.default],
        fallbacks=[aten.native_layer_norm.default, aten.sort.default, aten.mm.default],
    )  # fmt: skip

    def call(a: torch.Tensor) -> Any:
        values, order = torch.sort(a.t())
        return values, order, F.layer_norm(a.t(), (4,)), a.t() @ a

    a = torch.arange(12.0).reshape(4, 3).flip(0).contiguous().to(NAME)
    out, want = torch.compile(call, backend=made.backend(), fullgraph=True)(a), call(a)
    pairs = [(o.stride(), w.stride()) for o, w in zip(out, want, strict=True)]
    bad = [f"strides {o} instead of {w}" for o, w in pairs if o != w]
    return bad + close(out, want)


def scalar() -> list[str]:
    """A CPU scalar does not move a device operator's call to the CPU."""
    out = compiled(lambda a, s: F.gelu(a * s), "A")(x.to(NAME), torch.tensor(2.0))
    return close((out,), (x * 20,))


def lite() -> list[str]:
    """In lite mode a policy has a say in marked regions alone; under plain torch.compile none, or it is refused."""

    def call(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> Any:
        plain = F.relu(a) * w, F.gelu(a), F.silu(a)
        with torch.fx.traceback.annotate({"compile_with_inductor": 0}):
            a = a * 2  # lite mode makes equal nodes one, marked or not
            return *plain, F.relu(a) * w, F.gelu(a), F.silu(a), F.relu(b), F.gelu(b)

    stock = (F.relu(x), F.gelu(x), F.silu(x), F.relu(2 * x), F.gelu(2 * x), F.silu(2 * x), F.relu(y), F.gelu(y))
    want = (*stock[:3], F.relu(2 * x) + 100, x * 20, *stock[5:])
    made = policy("A", NAME)
    assert made is not None
    w = torch.ones(8).to(NAME).requires_grad_(True)
    given = (x.to(NAME), y, w)
    options = {**torch._inductor.list_mode_options("lite"), "policy": made}
    ours = torch.compile(call, backend="collective_identity", options=options, fullgraph=True)
    out = ours(*given)
    (out[0] + out[3]).sum().backward()
    assert w.grad is not None
    bad = close((*out, w.grad), (*want, 3 * F.relu(x) + 100))
    torch._dynamo.reset()
    with register_policy(NAME, made):
        alone = torch.compile(call, mode="lite", fullgraph=True)(*given)
    bad += close(alone, stock)
    torch._dynamo.reset()
    try:
        torch.compile(call, backend=made.backend(), mode="lite", fullgraph=True)(*given)
    except Exception as error:
        return bad if "lite mode" in str(error) else [*bad, f"another error: {error}"]
    return [*bad, "policy.backend() was not refused in lite mode"]


def refused() -> list[str]:
    """Modes that policies do not cover, asked for as users ask: by name, before anything is lowered."""
    from torch._inductor import compile_fx

    made, a = policy("A", NAME), x.to(NAME)
    assert made is not None
    exported = torch.export.export(Relu(), (a,)).module()

    def under(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: torch.compile(F.relu, backend=made.backend(), options=options)(a)

    def subprocess(mode: str) -> Callable[[], Any]:
        def run() -> Any:
            with mock.patch.object(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode[mode]):
                return torch.compile(F.relu, backend=made.backend())(a)

        return run

    asked = {
        "AOTInductor": lambda: torch._inductor.aot_compile(exported, (a,)),  # type: ignore[arg-type]
        "cpp_wrapper": under({"cpp_wrapper": True}), "freezing": under({"freezing": True}),
        "SUBPROCESS": subprocess("SUBPROCESS"), "SERIALIZE": subprocess("SERIALIZE"),
    }  # fmt: skip
    bad = []
    for name, ask in asked.items():
        torch._dynamo.reset()
        with register_policy(NAME, made) if name == "AOTInductor" else nullcontext():
            try:
                ask()
                bad.append(f"{name} was not refused")
            except Exception as error:
                if name not in str(error) or "cannot be applied" not in str(error):
                    bad.append(f"{name}: {type(error).__name__} {error}")
    return bad


class Relu(torch.nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return F.relu(a)


def close(out: Any, want: Any) -> list[str]:
    pairs = [(o.detach().cpu().float(), w.detach().cpu().float()) for o, w in zip(out, want, strict=True)]
    return [f"{o.tolist()} instead of {w.tolist()}" for o, w in pairs if not torch.allclose(o, w, atol=1e-5)]


CASES = (sequence, registered, composed, kernels, nested, cond, dynamic, strided, scalar, lite, refused)


def main() -> None:
    torch.set_num_threads(1)
    install(NAME)
    only = sys.argv[1:]
    found: dict[str, Any] = {}
    for case in CASES:
        if only and case.__name__ not in only:
            continue
        torch._dynamo.reset()
        tables, start = Tables(), time.perf_counter()
        try:
            bad = case()
        except Exception:
            bad = [traceback.format_exc()[-3000:]]
        bad += [f"table changed: {name}" for name in tables.changed()]
        found[case.__name__] = {"bad": bad, "seconds": round(time.perf_counter() - start, 1)}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
