"""Policies that must be refused, with every fault at once; identity; what a collective pass may ask."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from typing import Any

import pytest
import torch

from inductor_passes.device_policy import FALLBACK, NoIdentity, OperatorPolicy, PolicyError, content_identity

aten = torch.ops.aten
BASE: dict[str, Any] = {"name": "p", "version": "1", "device_type": "cuda"}
TENSOR = torch.ones(2)
SCALE = 3
EMPTY = types.SimpleNamespace()


def plain(x: Any) -> Any:
    return x * SCALE


def over_tensor(x: Any) -> Any:
    return x + TENSOR


def over_object(x: Any) -> Any:
    return x + EMPTY.value


def undefined(x: Any) -> Any:
    return not_there(x)  # type: ignore[name-defined]  # noqa: F821


def imports_inside(x: Any) -> Any:
    import tests.graphs as graphs

    return graphs


def tensor_default(x: Any, other: Any = TENSOR) -> Any:
    return x


def closure(over: Any) -> Any:
    def inner(x: Any) -> Any:
        return x + over

    return inner


def nothing() -> None:
    return None


def two(x: Any, other: Any) -> Any:
    return x


def generator(x: Any) -> Any:
    yield x


async def later(x: Any) -> Any:
    return x


def breaks() -> Any:
    yield aten.sin
    raise RuntimeError("broke")


class Breaks(dict[Any, Any]):
    def items(self) -> Any:
        raise RuntimeError("broke")


class Stateful:
    def __call__(self, x: Any) -> Any:
        return x

    def method(self, x: Any) -> Any:
        return x


def D(function: Any) -> dict[str, Any]:
    return {"decompositions": {aten.gelu.default: function}}


def L(function: Any) -> dict[str, Any]:
    return {"lowerings": {aten.relu.default: function}}


ANONYMOUS = lambda x: x  # noqa: E731

BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name expects"),
    ({"name": " "}, "name expects"),
    ({"name": 3}, "name expects"),
    ({"name": "two\nlines"}, "on one line"),
    ({"version": "\0"}, "on one line"),
    ({"version": ""}, "version expects"),
    ({"version": None}, "version expects"),
    ({"device_type": "cpu"}, "not an accelerator"),
    ({"device_type": "meta"}, "not an accelerator"),
    ({"device_type": "cuda:0"}, "without an index"),
    ({"device_type": "toaster"}, "not known to torch"),
    ({"device_type": None}, "device_type expects a text"),
    ({"decompositions": [aten.gelu.default]}, "decompositions expects a mapping"),
    ({"lowerings": "relu"}, "lowerings expects a mapping"),
    ({"fallbacks": aten.sin.default}, "fallbacks expects a collection"),
    ({"fallbacks": "aten::sin"}, "fallbacks expects a collection"),
    ({"remove_decompositions": 3}, "remove_decompositions expects a collection"),
    ({"fallbacks": {aten.sin: 1}}, "fallbacks expects a collection"),
    ({"fallbacks": breaks()}, "fallbacks cannot be read: RuntimeError: broke"),
    ({"lowerings": Breaks()}, "lowerings cannot be read: RuntimeError: broke"),
    ({"fallbacks": ["aten::sin."]}, "does not exist"),
    ({"fallbacks": ["aten::no_such_operator"]}, "does not exist"),
    ({"lowerings": {"aten::relu.nope": plain}}, "does not exist"),
    ({"decompositions": {"nowhere::op": plain}}, "does not exist"),
    ({"fallbacks": [torch.sin]}, "expects operators"),
    ({"fallbacks": [None]}, "expects operators"),
    ({"lowerings": {3: plain}}, "expects operators"),
    ({"fallbacks": [aten.relu_.default]}, "writes to its arguments"),
    ({"lowerings": {aten.add_.Tensor: plain}}, "writes to its arguments"),
    ({"decompositions": {aten.copy_.default: plain}}, "writes to its arguments"),
    ({"fallbacks": [aten.relu_]}, "writes to its arguments"),
    ({"fallbacks": [aten.sin.out]}, "writes to its arguments"),
    ({"fallbacks": [aten.sin, aten.sin.default]}, "given twice"),
    ({"lowerings": {aten.sin: FALLBACK, aten.sin.default: FALLBACK}}, "given twice"),
    ({**D(plain), "lowerings": {aten.gelu.default: plain}}, "both a decomposition and a lowering"),
    ({**D(plain), "fallbacks": [aten.gelu.default]}, "both a decomposition and a lowering"),
    ({**D(plain), "remove_decompositions": [aten.gelu.default]}, "overridden and removed"),
    ({**L(plain), "fallbacks": [aten.relu.default]}, "both a lowering and a fallback"),
    ({"remove_decompositions": [aten.silu.default]}, "neither a lowering nor a fallback"),
    (D(FALLBACK), "expects a function"),
    (D(3), "expects a function"),
    (L(None), "expects a function or FALLBACK"),
    (L(ANONYMOUS), "is a lambda"),
    (L(Stateful()), "may carry state"),
    (L(Stateful().method), "is a bound method"),
    (L(functools.partial(plain, 1)), "may carry state"),
    (L(functools.lru_cache(plain)), "may carry state"),
    (L(Stateful), "may carry state"),
    (L(over_tensor), "global 'TENSOR' of over_tensor"),
    (L(over_object), "global 'EMPTY' of over_object"),
    (L(undefined), "'not_there'"),
    (L(imports_inside), "imports 'tests.graphs' inside imports_inside"),
    (L(tensor_default), "a default of tensor_default"),
    (D(closure(TENSOR)), "closure variable 'over'"),
    (D(closure(Stateful())), "closure variable 'over'"),
    (D(closure(ANONYMOUS)), "a lambda"),
    (L(nothing), "cannot be called with the arguments of aten::relu(Tensor self)"),
    (D(two), "missing a required argument: 'other'"),
    (L(generator), "is a generator"),
    (L(later), "is a generator or asynchronous"),
    ({"collectives": ["fsdp.param_unshard"]}, "collectives expects a mapping"),
    ({"collectives": {"unshard": ["fused"]}}, "collectives expects roles"),
    ({"collectives": {"tp.*.x": ["fused"]}}, "collectives expects roles"),
    ({"collectives": {" tp. x": ["fused"]}}, "collectives expects roles"),
    ({"collectives": {"tp.*": ["faster"]}}, "expects a collection of 'fused', 'low_contention'"),
    ({"collectives": {"tp.*": "fused"}}, "expects a collection of 'fused', 'low_contention'"),
]


def test_invalid_policies() -> None:
    assert len(BAD) >= 40
    for fields, wanted in BAD:
        with pytest.raises(PolicyError) as caught:
            OperatorPolicy(**{**BASE, **fields})
        assert any(wanted in fault for fault in caught.value.faults), (fields, caught.value.faults)


def test_every_fault_at_once() -> None:
    with pytest.raises(PolicyError) as caught:
        OperatorPolicy(
            "", "", "cpu",
            decompositions={aten.gelu.default: over_tensor},
            remove_decompositions=[aten.gelu.default, aten.silu.default],
            lowerings={aten.relu.default: Stateful(), aten.add_.Tensor: FALLBACK},
            fallbacks=["aten::nope"],
        )  # fmt: skip
    assert len(caught.value.faults) == 10
    assert all(fault in str(caught.value) for fault in caught.value.faults)


def test_frozen_and_by_content() -> None:
    one, two = (OperatorPolicy(**BASE, **L(plain), fallbacks=[aten.sin]) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one.backend() == two.backend() != one.backend(debug=True)
    assert one != OperatorPolicy(**BASE, fallbacks=[aten.sin])
    assert copy.deepcopy(one) is one and copy.deepcopy(FALLBACK) is FALLBACK is pickle.loads(pickle.dumps(FALLBACK))
    assert type(FALLBACK)() is FALLBACK
    assert aten.sin.default in one.fallbacks and aten.sin.out not in one.fallbacks
    with pytest.raises(TypeError):
        one.lowerings[aten.sin.default] = plain  # type: ignore[index]
    with pytest.raises(AttributeError):
        one.name = "other"  # type: ignore[misc]


def identity_of(source: str) -> str:
    scope: dict[str, Any] = {"__name__": "made_up"}
    exec(source, scope)
    return content_identity(scope["f"])


FORM = "SCALE = {scale}\ndef helper(x):\n    return x {op} SCALE\ndef f(x, by={default}):\n    return helper(x) * by\n"


def test_identity_follows_content() -> None:
    base = {"scale": 2, "op": "+", "default": 1}
    first = identity_of(FORM.format(**base))
    assert identity_of("# moved\n\n" + FORM.format(**base)) == first
    changed = [{"scale": 3}, {"scale": 2.0}, {"scale": True}, {"op": "-"}, {"default": 2}]
    others = {identity_of(FORM.format(**{**base, **change})) for change in changed}
    assert len(others) == len(changed) and first not in others
    assert content_identity(closure(1)) != content_identity(closure(2)) != content_identity(closure(plain))


def test_identity_of_what_torchs_factories_make() -> None:
    from torch._inductor.lowering import make_pointwise

    assert content_identity(make_pointwise(plain)) != content_identity(make_pointwise(tensor_free))


def tensor_free(x: Any) -> Any:
    return x


def test_identity_follows_python(monkeypatch: pytest.MonkeyPatch) -> None:
    before, policy = content_identity(plain), OperatorPolicy(**BASE, **L(plain))
    monkeypatch.setattr("inductor_passes.device_policy.identity.PYTHON", "2.7")
    assert content_identity(plain) != before
    assert OperatorPolicy(**BASE, **L(plain)) != policy


def test_recursion_ends() -> None:
    assert identity_of("def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n")


def test_a_policy_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = OperatorPolicy(**BASE, **L(plain))
    policy.check_unchanged()
    monkeypatch.setitem(globals(), "SCALE", 4)
    with pytest.raises(PolicyError, match="changed after the policy was built"):
        policy.check_unchanged()
    monkeypatch.setitem(globals(), "SCALE", TENSOR)
    with pytest.raises(PolicyError, match="changed after the policy was built"):
        policy.check_unchanged()
    with pytest.raises(NoIdentity, match="SCALE"):
        content_identity(plain)


def test_collectives_by_role() -> None:
    rows = {"fsdp.param_unshard": ["low_contention"], "tp.*": ["fused"], "*": ["low_contention", "fused"]}
    policy = OperatorPolicy(**BASE, collectives=rows)
    assert policy.allows("fsdp.param_unshard", "low_contention") and not policy.allows("fsdp.param_unshard", "fused")
    assert policy.allows("tp.gather", "fused") and not policy.allows("tp.gather", "low_contention")
    assert policy.allows(None, "fused") and policy.allows("cp.ring", "fused")
    assert not OperatorPolicy(**BASE, collectives={}).allows("tp.gather", "fused")
    assert OperatorPolicy(**BASE).allows("tp.gather", "fused")
    assert policy != OperatorPolicy(**BASE, collectives={**rows, "*": []})
    with pytest.raises(ValueError, match="found 'faster'"):
        policy.allows(None, "faster")
