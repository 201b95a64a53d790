"""A traced step and what was changed around it since, or cannot be traced: refused by name, never replayed silently."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import collective_identity as ci
import fsdp_hooks
from tests.unit.sharded import Model, sharded

pytestmark = pytest.mark.usefixtures("fake_world")

X = torch.ones(2, 8)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def keep(*args: Any) -> None:
    return None


CHANGES: dict[str, tuple[Callable[[Model], object], str]] = {
    "frozen": (
        lambda m: m.head.requires_grad_(False),
        "expects requires_grad of parameter 'head.weight' to be True, as it was traced, found False: set it back, or",
    ),
    "unfrozen": (
        lambda m: m.blocks[1].bias.requires_grad_(True),
        "expects requires_grad of parameter 'blocks.1.bias' to be False, as it was traced, found True",
    ),
    "no sync": (
        lambda m: m.set_requires_gradient_sync(False),
        "expects gradient sync (set_requires_gradient_sync, set_requires_all_reduce) of parameter 'head.weight' to be "
        "'all', as it was traced, found 'none': set both to True",
    ),
    "divide factor": (
        lambda m: m.blocks[0].set_gradient_divide_factor(3.0),
        "expects FSDP2's reduce_op (set_gradient_divide_factor, set_force_sum_reduction_for_comms) of parameter "
        "'blocks.0.0.weight' to be 'avg', as it was traced, found 'sum': set it back, or trace the step again",
    ),
    "reshard": (
        lambda m: m.blocks[1].set_reshard_after_forward(False),
        "expects FSDP2's reshard_after_forward (set_reshard_after_forward) of parameter 'blocks.1.weight' to be True",
    ),
    "all-reduce hook": (
        lambda m: m.blocks[0].set_all_reduce_hook(keep),
        "expects FSDP2's options that a graph does not honour of module 'blocks.0' to be none, as it was traced, found "
        "set_all_reduce_hook: set them back",
    ),
    "tensor hook": (
        lambda m: m.head.weight.register_hook(keep),
        "expects gradient hooks (register_hook, register_post_accumulate_grad_hook) of parameter 'head.weight' to be 0",
    ),
    "accumulation hook": (
        lambda m: m.head.weight.register_post_accumulate_grad_hook(keep),
        "of parameter 'head.weight' to be 0, as it was traced, found 1: remove them, a graph calls none",
    ),
    "module hook": (lambda m: m.head.register_forward_hook(keep), "expects hooks of module 'head' to be none"),
    "eval": (lambda m: m.eval(), "expects train() or eval() of the root module to be True, as it was traced"),
    "replaced module": (lambda m: setattr(m, "head", nn.Linear(8, 8)), "found module 'head' replaced, added or taken"),
    "new parameter": (
        lambda m: m.register_parameter("late", nn.Parameter(torch.ones(1))),
        "found parameter 'late' replaced, added or taken away: trace it again",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_after_the_trace_is_named(name: str) -> None:
    change, said = CHANGES[name]
    model: Any = sharded()
    model.blocks[1].bias.requires_grad_(False)
    step = fsdp_hooks.trace_train_step(model, loss_fn, (X,))
    step(X)
    change(model)
    with pytest.raises(fsdp_hooks.InstallError, match=re.escape(said)):
        step(X)


def test_what_is_set_back_is_as_it_was() -> None:
    """Also after an eager step that left the root's parameters gathered, and inside an installed model."""
    model: Any = sharded()
    step = fsdp_hooks.trace_train_step(model, loss_fn, (X,))
    model.set_requires_gradient_sync(False)
    model.eval()
    handle = model.head.weight.register_hook(keep)
    model.set_requires_gradient_sync(True)
    model.train()
    handle.remove()
    loss_fn(model, X).backward()
    step(X)
    fsdp_hooks.install(model)
    step(X)


def test_gradients_that_wait_are_not_left_behind() -> None:
    """In eager FSDP2, and in an installed model: its next step that communicates would take them."""
    model: Any = sharded()
    step = fsdp_hooks.trace_train_step(model, loss_fn, (X,))
    for installed in (False, True):
        model.set_requires_gradient_sync(False)
        loss_fn(model, X).backward()
        model.set_requires_gradient_sync(True)
        with pytest.raises(fsdp_hooks.InstallError, match="accumulated and did not reduce yet|that wait for commun"):
            step(X)
        if installed:
            with pytest.raises(fsdp_hooks.UnsupportedOption, match="that wait for communication of the root module"):
                fsdp_hooks.trace_train_step(model, loss_fn, (X,))
        loss_fn(model, X).backward()
        step(X)
        if not installed:
            fsdp_hooks.install(model)


@pytest.mark.parametrize("sync", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_without_gradient_sync_nothing_is_traced(sync: str) -> None:
    model: Any = sharded(shape=(2, 2))
    getattr(model.blocks[0], sync)(False)
    with pytest.raises(fsdp_hooks.UnsupportedOption, match="expects gradient sync .* of parameter 'blocks.0.0.weight'"):
        fsdp_hooks.trace_train_step(model, loss_fn, (X,))


def test_hooks_of_an_installed_model_are_refused_by_the_trace() -> None:
    model: Any = fsdp_hooks.install(sharded())
    model.head.weight.register_hook(keep)
    with pytest.raises(fsdp_hooks.UnsupportedOption, match="expects gradient hooks .* of parameter 'head.weight' to"):
        fsdp_hooks.trace_train_step(model, loss_fn, (X,))


class Checkpointed(nn.Module):
    """One weight, read twice inside a checkpoint."""

    def __init__(self, *, dropout: float = 0.0, select: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.how: dict[str, Any] = {"use_reentrant": False}
        if select:
            only = [torch.ops.aten.mm.default]
            self.how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, only)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.linear(self.dropout(self.linear(y).tanh())), x, **self.how)


@pytest.mark.parametrize("select", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
def test_a_checkpoint_recomputes_with_the_parameters_of_each_step(select: bool, around: bool, reshard: bool) -> None:
    """Nothing of a parameter is in the graph but its input; it is gathered for backward if FSDP2 would do so."""
    model = Checkpointed(select=select)
    fully_shard(model, reshard_after_forward=reshard)
    run: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False) if around else lambda m, x: m(x)
    gm = fsdp_hooks.trace_train_step(model, lambda m, x: run(m, x).square().mean(), (X,)).graph_module
    assert [node for node in gm.graph.nodes if node.op == "get_attr"] == []
    identities = [ci.identity_of(node) for node in ci.start_nodes(gm)]
    roles = [one.role for one in identities if one is not None and one.source is ci.Source.EXPLICIT]
    assert roles == [ci.PARAM_UNSHARD] * (2 if reshard else 1) + [ci.GRAD_REDUCE_SHARD]


def test_a_checkpoint_that_draws_random_numbers_again_is_refused() -> None:
    model = Checkpointed(dropout=0.5)
    fully_shard(model)
    with pytest.raises(fsdp_hooks.UnsupportedOption, match="expects no random numbers in backward, found aten.berno"):
        fsdp_hooks.trace_train_step(model, loss_fn, (X,))


def test_a_gradient_that_would_leave_the_model_is_refused() -> None:
    """A criterion with weights, and a reference to the model's own; a teacher without gradients is neither."""
    model: Any = sharded()
    other = nn.Linear(8, 8)
    own = model.head.weight
    for penalty, found in (
        (lambda y: other(y).sum(), r"found a tensor of shape \[8(, 8)?\] read from outside it"),
        (lambda y: own.to_local().sum(), "found 'head.weight' read from outside it"),
    ):
        with pytest.raises(fsdp_hooks.UnsupportedOption, match=found):
            fsdp_hooks.trace_train_step(model, lambda m, x, extra=penalty: extra(m(x)) + loss_fn(m, x), (X,))

    def taught(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = other(x)
        return (model(x) - wanted).square().mean()

    fsdp_hooks.trace_train_step(model, taught, (X,))(X)
