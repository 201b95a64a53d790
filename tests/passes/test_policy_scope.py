"""What one compile is given under a policy, and registration; nothing is compiled here."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from inductor_passes import upstream
from inductor_passes.device_policy import OperatorPolicy, PolicyError, register_policy, registered_policy
from inductor_passes.device_policy.backend import scope
from inductor_passes.device_policy.lowering import NodeLowering, retarget
from inductor_passes.device_policy.registration import replacement_allowed

aten = torch.ops.aten
PAGE = Path(__file__).resolve().parents[2] / "docs" / "device-policy.md"


def times_ten(x: Any, approximate: str = "none") -> Any:
    return x * 10


def policy(**more: Any) -> OperatorPolicy:
    return OperatorPolicy("p", "1", "cuda", decompositions={aten.gelu.default: times_ten}, fallbacks=[aten.sin], **more)


def test_the_page_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    made: dict[str, Any] = {"__name__": "acme", "DEVICE": "cuda"}
    exec(code, made)
    assert len(code.splitlines()) <= 36 and callable(made["compiled"])


@pytest.mark.parametrize("mode", ["cpp_wrapper", "fx_wrapper", "freezing"])
def test_modes_refused_by_name(mode: str) -> None:
    with pytest.raises(PolicyError, match=mode):
        scope(policy(), {mode: True})


def test_other_compile_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    with V.set_aot_compilation(True), pytest.raises(PolicyError, match="AOTInductor"):
        scope(policy(), {})
    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode.SUBPROCESS)
    with pytest.raises(PolicyError, match="SUBPROCESS"):
        scope(policy(), {})


def test_nodes_and_decompositions_by_device() -> None:
    added = scope(policy(), {})
    table = added["decompositions"]
    with FakeTensorMode():
        device, host = torch.empty(4, device="cuda"), torch.empty(4)
        graph = fx.Graph()
        for value in (device, host):
            one = graph.placeholder("x")
            one.meta["val"] = value
            graph.call_function(aten.sin.default, (one,)).meta["val"] = value
        assert retarget(graph, policy()) == 1
        assert [isinstance(node.target, NodeLowering) for node in graph.nodes] == [False, True, False, False]
        assert table[aten.gelu.default](device).device.type == "cuda"
    restored = pickle.loads(pickle.dumps(added["provider"]))
    assert pickle.dumps(restored) == pickle.dumps(table)
    with pytest.raises(PolicyError, match="were not kept"):
        restored()


def test_registration_is_undone() -> None:
    stock, made = upstream.current_compile_fx(), policy(collectives={})
    with pytest.raises(PolicyError, match="own device 'cuda'"):
        register_policy("xpu", made)
    with register_policy("cuda", made) as registration:
        assert registered_policy("cuda") is made and registered_policy("xpu") is None
        with FakeTensorMode():
            node = fx.Graph().placeholder("x")
            node.meta["val"] = torch.empty(1, device="cuda")
        assert not replacement_allowed(node, "tp.gather", "fused")
        assert replacement_allowed(node, "tp.gather", "fused", policy())
        with pytest.raises(PolicyError, match="has the policy 'p' already"):
            register_policy("cuda", made)
    registration.close()
    assert upstream.current_compile_fx() is stock and registered_policy("cuda") is None
