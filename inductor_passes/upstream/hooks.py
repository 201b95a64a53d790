"""How do passes get into a compile, behind the user's own? One slot of torch's each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass


def has_joint_pass() -> bool:
    """Whether the user set a joint pass. It is in no key of torch's (``_save_config_ignore`` in its config)."""
    return callable(functorch_config.joint_custom_pass)


@contextmanager
def joint_pass(run: Callable[[fx.GraphModule], None]) -> Iterator[None]:
    """Run ``run`` on every joint graph before it is partitioned, after a pass that the user set there."""
    user = functorch_config.joint_custom_pass

    def both(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        if callable(user):
            gm = user(gm, inputs)
        run(gm)
        return gm

    with functorch_config.patch(joint_custom_pass=both):  # type: ignore[attr-defined]
        yield


class _PostGrad(CustomGraphPass):
    """The user's ``post_grad_custom_pre_pass`` first, then ours, as one pass (2.11 and 2.12 have one slot)."""

    def __init__(self, run: Callable[[fx.GraphModule], None], identity: str, user: tuple[Any, ...]) -> None:
        self._run, self._identity, self._user = run, identity, user

    def __call__(self, graph: fx.Graph) -> None:
        for one in self._user:
            one(graph)
        gm = graph.owning_module
        assert gm is not None, "Inductor's post-grad stage works on the graph of a module"
        self._run(gm)

    def uuid(self) -> Any | None:
        users = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._user]
        return None if any(one is None for one in users) else (self._identity, *users)


@contextmanager
def post_grad_pass(
    run: Callable[[fx.GraphModule], None], identity: str, user: tuple[Any, ...]
) -> Iterator[None]:
    """Run the user's passes, then ``run``, on the graph about to be lowered; ``identity`` enters its cache key."""
    both = _PostGrad(run, identity, user)
    with inductor_config.patch(post_grad_custom_pre_pass=both):  # type: ignore[attr-defined]
        yield


_SchedulerPass: type[Any] = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)  # 2.13 and later


class _BeforeFusion(_SchedulerPass):  # type: ignore[misc]
    """The user's ``_pre_fusion_custom_pass`` first, then ours on each kernel that is called and not generated."""

    def __init__(self, run: Callable[[Any, list[fx.Node]], None], identity: str, user: Any) -> None:
        self._run, self._identity, self._user = run, identity, user

    def __deepcopy__(self, memo: object) -> _BeforeFusion:
        return self  # Inductor copies its configuration deeply

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor import ir

        if self._user is not None:
            nodes = self._user(nodes)
        for node in nodes:
            for one in node.get_nodes():
                if isinstance(one.node, ir.ExternKernel):
                    self._run(one.node, [n for n in one.node.get_origins() if isinstance(n, fx.Node)])
        return nodes

    def uuid(self) -> Any | None:
        if self._user is None:
            return self._identity
        user = self._user.uuid() if hasattr(self._user, "uuid") else None
        return None if user is None else (self._identity, user)


@contextmanager
def called_kernels(run: Callable[[Any, list[fx.Node]], None], identity: str) -> Iterator[None]:
    """Show ``run`` each kernel that the compile calls and does not generate, and the FX nodes it comes from.

    ``_pre_fusion_custom_pass``, which lite mode runs as well; ``identity`` enters the cache key.
    """
    user = inductor_config._pre_fusion_custom_pass
    with inductor_config.patch(_pre_fusion_custom_pass=_BeforeFusion(run, identity, user)):  # type: ignore[attr-defined]
        yield


def write_around(kernel: Any, imports: str, before: str, after: str) -> None:
    """Have the generated Python code hold these lines around the call of a kernel.

    ``ExternKernel.codegen(wrapper)`` in torch/_inductor/ir.py. C++ and FX wrappers hold no Python lines and get none.
    """
    if "codegen" in vars(kernel):
        return  # marked already: a scheduler may be built twice
    original = kernel.codegen

    def codegen(wrapper: Any) -> None:
        from torch._inductor.virtualized import V

        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            return original(wrapper)  # type: ignore[no-any-return]
        wrapper.add_import_once(imports)
        wrapper.writeline(before)
        original(wrapper)
        wrapper.writeline(after)

    kernel.codegen = codegen
