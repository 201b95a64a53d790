"""What is in the keys of torch's two compile caches: everything of ours that can change the output, nothing when off.

Keys are computed where torch computes them, for the graphs that the backend hands over, and nothing is lowered:
AOTAutogradCache's on the graph that Dynamo captured, FxGraphCache's on the forward and on the backward graph.
tests/distributed/test_cache.py shows the hits and misses that follow.
"""

from __future__ import annotations

import enum
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config as compiler_config
from torch._dynamo.utils import counters

import collective_identity as ci
import inductor_passes
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from inductor_passes import upstream
from inductor_passes.backend import collective_identity
from tests.graphs import payload
from tests.passes import keys_of
from tests.passes.keys_of import SAID, C, Keys, keys, stock

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def base(fake_world: int, folder: Path) -> Keys:
    """The keys that every change is compared with."""
    with ci.enable(agreement_timeout=0):
        return keys(collective_identity, folder, SAID)


def test_the_same_program_has_the_same_keys(base: Keys, folder: Path) -> None:
    with ci.enable(agreement_timeout=0):
        assert keys(collective_identity, folder, dict(SAID)) == base
    assert set(base) == {"aot", "forward", "backward"}


class Role(str, enum.Enum):
    """Absent to the contract, which takes types exactly; the plain text is valid."""

    UNSHARD = PARAM_UNSHARD


class Version(enum.IntEnum):
    ONE = 1


CHANGES: dict[str, dict[str, Any]] = {
    "role, an enum's member": payload(Role.UNSHARD, params=["w"]),
    "version, an enum's member": payload(PARAM_UNSHARD, params=["w"], version=Version.ONE),
    "role": payload("user.weights", params=["w"]),
    "role, malformed here": payload(GRAD_REDUCE_SHARD, params=["w"]),
    "producer": payload(PARAM_UNSHARD, params=["w"], producer="simple_fsdp"),
    "source": payload(PARAM_UNSHARD, params=["w"], source="inferred"),
    "version": payload(PARAM_UNSHARD, params=["w"], version=2),
    "params": payload(PARAM_UNSHARD, params=["v"]),
    "param_group": payload(PARAM_UNSHARD, params=["w"], param_group="layers.0"),
    "unknown field": payload(PARAM_UNSHARD, params=["w"], colour="blue"),
}


def assert_all_differ(found: Keys, base: Keys) -> None:
    assert set(found) == set(base)
    assert not [name for name in base if found[name] == base[name]], "a key does not tell them apart"


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_payload_changes_every_key(change: str, base: Keys, folder: Path) -> None:
    with ci.enable(agreement_timeout=0):
        assert_all_differ(keys(collective_identity, folder, CHANGES[change]), base)


def test_no_payload_is_another_graph(base: Keys, folder: Path) -> None:
    with ci.enable(agreement_timeout=0):
        assert_all_differ(keys(collective_identity, folder, None), base)


OPTIONS: dict[str, dict[str, Any]] = {
    "bucketing": {"bucketing": False},
    "kinds": {"kinds": ["all_gather"]},
    "cap_mb": {"cap_mb": 25},
    "order": {"order": "graph"},
    "reshard": {"reshard": False},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_changed_option_changes_every_key(option: str, base: Keys, folder: Path) -> None:
    with ci.enable(agreement_timeout=0):
        assert_all_differ(keys(collective_identity, folder, SAID, **OPTIONS[option]), base)


def test_observing_is_not_optimizing(base: Keys, folder: Path) -> None:
    with ci.enable(mode="observe", agreement_timeout=0):
        assert_all_differ(keys(collective_identity, folder, SAID), base)


def test_another_version_of_the_packages_changes_every_key(
    base: Keys, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "source_hash", lambda *packages: "another version")
    with ci.enable(agreement_timeout=0):
        assert_all_differ(keys(collective_identity, folder, SAID), base)


def test_any_edit_is_another_version(tmp_path: Path) -> None:
    """Of any of the three packages, in any file, the version's own included."""
    packages = [tmp_path / name for name in ("collective_identity", "fsdp_hooks", "inductor_passes")]
    for package in packages:
        shutil.copytree(ROOT / package.name, package, ignore=shutil.ignore_patterns("__pycache__"))

    def fresh_hash() -> str:
        """As a new process computes it: torch and we remember the answer."""
        upstream.caches.get_hash_for_files.cache_clear()
        upstream.source_hash.cache_clear()
        return upstream.source_hash(*packages)

    assert fresh_hash() == fresh_hash()
    hashes = {fresh_hash()}
    for edited in ("collective_identity/version.py", "fsdp_hooks/spec.py", "inductor_passes/bucketing/plan.py"):
        with (tmp_path / edited).open("a") as file:
            file.write("\n# edited\n")
        hashes.add(fresh_hash())
    assert len(hashes) == 4


def test_the_users_own_tag_stays_in_the_keys(base: Keys, folder: Path) -> None:
    with compiler_config.patch(cache_key_tag="mine"), ci.enable(agreement_timeout=0):  # type: ignore[attr-defined]
        assert_all_differ(keys(collective_identity, folder, SAID), base)
        assert compiler_config.cache_key_tag == "mine"


# --- what only the trace shows ---------------------------------------------------------------------------------


def gathers(role: str) -> Callable[..., torch.Tensor]:
    """A composite operator's Python code, whose role Dynamo does not see."""

    def gather(w: torch.Tensor, group: str) -> torch.Tensor:
        with ci.role_scope(role, producer="test"):
            return C.wait_tensor(C.all_gather_into_tensor(w, 4, group))

    return gather


def composite_step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    full = torch.ops.keys_test.gather(w, torch.distributed.group.WORLD.group_name)  # type: ignore[union-attr]
    return (x @ full.T).sin().sum()


def test_a_role_inside_a_composite_operator_changes_the_key_of_its_graph(
    fake_world: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FxGraphCache keys the traced graph's payloads; AOTAutogradCache, which cannot, is not asked."""
    monkeypatch.setattr(keys_of, "step", lambda said: composite_step)
    found = []
    for role in (PARAM_UNSHARD, "user.weights", PARAM_UNSHARD):
        with torch.library._scoped_library("keys_test", "FRAGMENT") as lib, ci.enable(agreement_timeout=0):
            lib.define("gather(Tensor w, str group) -> Tensor")
            lib.impl("gather", gathers(role), "CompositeImplicitAutograd")
            counters.clear()
            found.append(keys(collective_identity, folder, None))
            assert dict(counters["collective_identity"]) == {
                "autograd_cache_bypass": 1,
                "autograd_cache_bypass: operator keys_test::gather": 1,
            }
    first, other, again = found
    assert first == again and set(first) == {"forward", "backward"}
    assert first["forward"] != other["forward"]


# --- off -------------------------------------------------------------------------------------------------


def test_stock_keys_are_what_they_are_without_us(base: Keys, folder: Path, tmp_path: Path) -> None:
    """In a process that has imported, enabled and used everything, and in one that has imported nothing of ours."""
    with ci.enable(agreement_timeout=0):
        found = keys(stock, folder, None)
    assert keys(stock, folder, None) == found
    assert elsewhere("stock", tmp_path) == found


def test_stock_keys_do_not_see_roles(base: Keys, folder: Path) -> None:
    """Why ours have to be in the key: without us another role would take the same artifact."""
    one, other = (keys(stock, folder, CHANGES[change]) for change in ("role", "producer"))
    assert one["forward"] == other["forward"] and one["backward"] == other["backward"]
    assert one["forward"] != base["forward"]


def test_a_fresh_process_has_the_same_keys(base: Keys, tmp_path: Path) -> None:
    assert elsewhere("ours", tmp_path) == base


def elsewhere(which: str, folder: Path) -> Keys:
    """The same keys computed in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.passes.keys_of", which, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_the_packages_under_test_are_the_checkouts() -> None:
    assert Path(inductor_passes.__file__).parent.parent == ROOT
