"""The backend's options: what is refused and how, what is passed on, what the fingerprint tells apart."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from inductor_passes.device_policy import OperatorPolicy
from inductor_passes.options import KINDS, BackendOptions, OptionError, parse_options

REPOSITORY = Path(__file__).resolve().parents[2]


def nothing(gm: fx.GraphModule) -> None: ...


class Stable:
    """A pass with a name that does not change from process to process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, gm: fx.GraphModule) -> None: ...

    def uuid(self) -> str:
        return self.name


def test_none() -> None:
    assert parse_options(None, None) == parse_options({}, "") == BackendOptions()
    assert BackendOptions().kinds == KINDS


BAD = [
    ({"inner": "eager"}, "option 'inner' expects one of 'inductor', 'aot_eager', found 'eager'"),
    ({"order": "size"}, "option 'order' expects one of 'param_group', 'graph', 'fqn', found 'size'"),
    ({"bucketing": 1}, "option 'bucketing' expects one of True, False, found 1"),
    ({"bucketing": None}, "option 'bucketing' expects one of True, False, found None"),
    ({"kernels": "cuda"}, "option 'kernels' expects one of 'ops', 'triton', 'auto', found 'cuda'"),
    ({"dedup": True}, "option 'dedup' expects one of 'off', 'drop', 'refuse', found True"),
    ({"fusion": "tp"}, "option 'fusion' expects one of True, False, found 'tp'"),
    ({"mixed_dtypes": 0}, "option 'mixed_dtypes' expects one of True, False, found 0"),
    ({"fqns": "w"}, "option 'fqns' expects a list or a tuple, found 'w'"),
    ({"fqns": [1]}, "option 'fqns' expects parameter names, found (1,)"),
    ({"reshard": "yes"}, "option 'reshard' expects one of True, False, found 'yes'"),
    (
        {"kinds": ["all_gather", "broadcast"]},
        "option 'kinds' expects one of 'all_gather', 'reduce_scatter', 'all_reduce', found 'broadcast'",
    ),
    ({"kinds": "all_gather"}, "option 'kinds' expects a list or a tuple, found 'all_gather'"),
    ({"kinds": None}, "option 'kinds' expects a list or a tuple, found None"),
    ({"cap_mb": 0}, "option 'cap_mb' expects a positive number of MiB, or several, found 0"),
    ({"cap_mb": -1.5}, "option 'cap_mb' expects a positive number of MiB, or several, found -1.5"),
    ({"cap_mb": True}, "option 'cap_mb' expects a positive number of MiB, or several, found True"),
    ({"cap_mb": "25"}, "option 'cap_mb' expects a positive number of MiB, or several, found '25'"),
    ({"cap_mb": float("nan")}, "option 'cap_mb' expects a positive number of MiB, or several, found nan"),
    ({"cap_mb": []}, "option 'cap_mb' expects a positive number of MiB, or several, found []"),
    ({"cap_mb": [1, None]}, "option 'cap_mb' expects a positive number of MiB, or several, found [1, None]"),
    ({"policy": "mine"}, "option 'policy' expects an OperatorPolicy, found 'mine'"),
    (
        {"inner": "aot_eager", "policy": OperatorPolicy("p", "1", "cuda")},
        "inner='aot_eager' lowers nothing and expects no policy, found 'p': remove it, or use inner='inductor'",
    ),
    ({"pre_passes": ["look"]}, "option 'pre_passes' expects callables, found ('look',)"),
    ({"pre_passes": nothing}, f"option 'pre_passes' expects a list or a tuple, found {nothing!r}"),
    (
        {"inner": "aot_eager", "strict_lite": True},
        "inner='aot_eager' runs without Inductor, whose lite mode 'strict_lite' is: remove one of the two",
    ),
    (
        {"inner": "aot_eager", "max_autotune": True, "cpp_wrapper": True},
        "inner='aot_eager' runs without Inductor and expects none of its options, found cpp_wrapper, max_autotune: "
        "remove them, or use inner='inductor'",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value).split(" at 0x")[0][:40])
def test_a_bad_value_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_options(options, None)
    assert str(raised.value) == message


def test_the_page_has_every_option_and_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| \S", (REPOSITORY / "docs" / "options.md").read_text(), re.MULTILINE)
    options = {f.name: getattr(BackendOptions(), f.name) for f in dataclasses.fields(BackendOptions)}
    del options["inductor"]
    assert {name: ast.literal_eval(default) for name, default in rows} == options and len(rows) == len(options)


def test_a_name_close_to_an_option_is_offered() -> None:
    with pytest.raises(OptionError, match=r"found 'overlapp' \(did you mean 'overlap'\?\): remove or correct them$"):
        parse_options({"overlapp": 1}, None)


@pytest.mark.parametrize("name", ["blocks", "inductor", "triton", "triton.no_such"])
def test_an_unknown_option_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_options({name: 1, "order": "graph"}, None)
    assert str(raised.value) == (
        "backend 'collective_identity' expects options among bucketing, cap_mb, coalesced, dedup, dump, fqns, "
        "fusion, inner, kernels, kinds, mixed_dtypes, order, overlap, policy, pre_passes, reshard, strict_lite, or "
        f"Inductor's own (torch._inductor.list_options()), found {name!r}: remove or correct them"
    )


def test_an_unknown_mode_is_refused_with_those_that_exist() -> None:
    with pytest.raises(OptionError, match="^option 'mode' expects one of 'default', 'lite'.*, found 'fast'$"):
        parse_options(None, "fast")


def test_what_is_accepted() -> None:
    given = {
        "inner": "aot_eager",
        "bucketing": False,
        "kinds": ["all_reduce"],
        "cap_mb": [1, 2.5],
        "order": "fqn",
        "fqns": ["w"],
        "mixed_dtypes": True,
        "dedup": "refuse",
        "fusion": True,
        "reshard": False,
        "pre_passes": [nothing],
    }
    names = list(given)
    assert parse_options(given, None) == BackendOptions(
        inner="aot_eager",
        bucketing=False,
        kinds=("all_reduce",),
        cap_mb=(1.0, 2.5),
        order="fqn",
        fqns=("w",),
        mixed_dtypes=True,
        dedup="refuse",
        fusion=True,
        reshard=False,
        pre_passes=(nothing,),
    )
    assert list(given) == names, "not consumed"
    assert parse_options({"cap_mb": 25}, None).cap_mb == 25.0
    assert parse_options({"cap_mb": None}, None).cap_mb is None
    assert parse_options({"kinds": ()}, None).kinds == ()


# ---- Inductor's options and modes ----


def test_inductors_options_are_passed_on() -> None:
    options = parse_options({"max_autotune": True, "triton.cudagraphs": False, "order": "graph"}, None)
    assert options.inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert options.order == "graph"


def test_a_mode_adds_its_options_and_options_win() -> None:
    assert parse_options(None, "max-autotune-no-cudagraphs").inductor == {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
    }
    assert parse_options({"max_autotune": False}, "max-autotune-no-cudagraphs").inductor == {
        "max_autotune": False,
        "coordinate_descent_tuning": True,
    }
    assert parse_options(None, "lite").inductor["fallback_by_default"] is True
    assert parse_options(None, "default") == BackendOptions()


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        parse_options({"max_autotune": True}, None).inductor["max_autotune"] = False  # type: ignore[index]


# ---- the fingerprint ----

DIFFERENT: list[dict[str, Any]] = [
    {},
    {"inner": "aot_eager"},
    {"bucketing": False},
    {"overlap": 1},
    {"dump": True},
    {"kinds": ["all_gather"]},
    {"kinds": []},
    {"cap_mb": 1},
    {"cap_mb": [1]},
    {"cap_mb": [1, 2]},
    {"order": "graph"},
    {"order": "fqn"},
    {"order": "fqn", "fqns": ["a", "b"]},
    {"order": "fqn", "fqns": ["b", "a"]},
    {"mixed_dtypes": True},
    {"coalesced": ["all_gather"]},
    {"dedup": "drop"},
    {"kernels": "triton"},
    {"dedup": "refuse"},
    {"fusion": True},
    {"reshard": False},
    {"strict_lite": True},
    {"pre_passes": [Stable("a")]},
    {"pre_passes": [Stable("b")]},
    {"pre_passes": [Stable("a"), Stable("b")]},
    {"pre_passes": [Stable("b"), Stable("a")]},
    {"pre_passes": [nothing]},
    {"policy": OperatorPolicy("a", "1", "cuda")},
    {"policy": OperatorPolicy("a", "2", "cuda")},
    {"max_autotune": True},
    {"max_autotune": False},
    {"post_grad_custom_pre_pass": Stable("a")},
    {"post_grad_custom_pre_pass": Stable("b")},
]


def test_every_option_is_in_the_fingerprint() -> None:
    prints = [parse_options(options, None).fingerprint() for options in DIFFERENT]
    assert len(set(prints)) == len(DIFFERENT)
    assert [parse_options(options, None).fingerprint() for options in DIFFERENT] == prints
    assert {key for options in DIFFERENT for key in options} >= set(json.loads(prints[0])) - {"inductor"}


def test_the_order_in_which_options_are_given_does_not_matter() -> None:
    a = parse_options({"max_autotune": True, "cpp_wrapper": True, "order": "fqn"}, None)
    b = parse_options({"order": "fqn", "cpp_wrapper": True, "max_autotune": True}, None)
    assert a.fingerprint() == b.fingerprint()


def with_callables() -> BackendOptions:
    given = {"pre_passes": [nothing, Stable("a")], "post_grad_custom_pre_pass": Stable("a")}
    return parse_options({**given, "joint_custom_post_pass": nothing}, None)


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    """No address of a function or object is in it: ranks compare fingerprints, caches outlive the process."""
    program = "from tests.passes.test_options import with_callables; print(with_callables().fingerprint())"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert there.stdout.strip() == with_callables().fingerprint()


def test_caches_need_names() -> None:
    assert BackendOptions().cacheable
    assert BackendOptions(pre_passes=(Stable("a"),)).cacheable
    assert not BackendOptions(pre_passes=(Stable("a"), nothing)).cacheable
