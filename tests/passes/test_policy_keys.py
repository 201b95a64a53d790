"""A policy in the keys of torch's two caches, and torch's own keys without one; nothing is lowered here.

``python -m benchmarks policy --prove`` shows the hits and misses that follow, each in a process of its own. Run as a
module this prints a fresh process's keys, torch's own taken before anything of ours is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.policy_graph import differences, mixed
from tests.passes.keys_of import Keys, keys_noted, stock

ROOT = Path(__file__).parents[2]


def keys(backend: Any, folder: Path, scope: AbstractContextManager[Any] | None = None) -> Keys:
    """The keys of a forward and a backward on the CPU, where a policy for another device changes no number."""
    torch._dynamo.reset()
    with keys_noted(folder) as noted, scope or nullcontext():
        assert differences(torch.compile(mixed, backend=backend, fullgraph=True), "cpu") == []
    found = dict(noted)
    assert len(found) == len(noted) and set(found) == {"aot", "forward", "backward"}
    return found


def under(name: str, folder: Path) -> Keys:
    from benchmarks.policy_case import backend

    return keys(backend(name, "cuda"), folder)


def test_without_a_policy_keys_are_torchs_own(tmp_path: Path) -> None:
    """Imported, built, registered for a device that the graph does not use; and a process that has none of ours."""
    from benchmarks.policy_case import policy
    from inductor_passes.device_policy import register_policy

    made = policy("A", "cuda")
    assert made is not None
    plain = keys(stock, tmp_path)
    assert keys(stock, tmp_path, register_policy("cuda", made)) == plain == keys(stock, tmp_path)
    elsewhere = fresh(tmp_path, hash_seed="7")
    assert elsewhere == {"torch": plain, "A": under("A", tmp_path)}


def test_policies_and_what_they_reach_are_in_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import policy_case
    from inductor_passes.device_policy import identity, model

    found = {"none": keys(stock, tmp_path), "A": under("A", tmp_path), "B": under("B", tmp_path)}
    assert under("A", tmp_path) == found["A"]
    for what in ("helper", "constant", "default", "python"):
        with monkeypatch.context() as patch:
            for owner, name in ((policy_case, "shifted"), (policy_case, "FACTOR"), (identity, "PYTHON"),
                                (policy_case.shifted, "__defaults__")):
                patch.setattr(owner, name, getattr(owner, name))  # so that it is put back
            policy_case.change(what)
            patch.setattr(model, "PYTHON", identity.PYTHON)
            found[what] = under("A", tmp_path)
    for cache in ("aot", "forward", "backward"):
        assert len({one[cache] for one in found.values()}) == len(found), f"{cache}: two share a key"
    assert under("A", tmp_path) == found["A"]


def fresh(folder: Path, hash_seed: str) -> dict[str, Keys]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.passes.test_policy_keys", str(folder)], capture_output=True, text=True,
        timeout=240, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    plain = keys(stock, Path(folder))
    ours = {"collective_identity", "fsdp_hooks", "inductor_passes"}
    assert not ours.intersection(sys.modules), "a process without us has imported us"
    print(json.dumps({"torch": plain, "A": under("A", Path(folder))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
