"""``trace_train_step``: forward, loss, backward and optimizer of a sharded model as one FX graph.

The model is traced as ``install`` captures it, on the parts that this rank holds, so every FSDP collective is a
functional one with an explicit role, and FSDP2's own hooks, streams and buffers are not in the graph. They need not
be: FSDP2's parameters are its state between steps, and the graph reads and writes exactly these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import collective_identity as ci
from collective_identity.ledger import STEP, GraphKind

from . import compat, compat_step
from .errors import InstallError, UnsupportedOption
from .expected import declare_step
from .installation import install_undeclared, is_installed, uninstall
from .step_inputs import Batch, Slot, like, local, slots_of, swapped
from .step_reshard import gather_again
from .step_standing import Standing
from .step_units import opened_once
from .step_update import Update
from .step_writes import Kept, check_writes

Loss = Callable[..., Any]


class TrainStep:
    """A traced training step; call it with a batch of the shapes it was traced with.

    Attributes:
        graph_module: the graph. Inputs: this rank's part of every parameter, the buffers, the optimizer's state and
            learning rates, the scaler's scale, the batch; it updates all but learning rates and batch in place, as
            eager training does, and returns what the loss function returned and the gradients.
    """

    def __init__(self, model: nn.Module, slots: tuple[Slot, ...], batch: Batch, update: Update) -> None:
        self._model, self._slots, self._batch, self._update = model, slots, batch, update
        self.graph_module: fx.GraphModule = fx.GraphModule(nn.Module(), fx.Graph())
        self._returned: Any = None
        self._run: Callable[..., Any] | None = None
        self._standing: Standing | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Returns what the loss function returns, detached.

        Without an optimizer the gradients are added to ``param.grad``, as ``backward`` does; with one the parameters
        are updated and ``param.grad`` stays None.

        Raises:
            InstallError: a batch, a module, a parameter, a hook, an option of FSDP2 or a hyperparameter is not as it
                was traced, or a gradient is left over from an eager step, which the optimizer in the graph would not
                see.
        """
        found = Batch.of(args, kwargs)
        self._batch.expect(found)
        self._update.expect_unchanged()
        compat.reshard_all(self._model)
        assert self._standing is not None
        self._standing.expect(self._model)
        for slot in self._slots:
            if self._update.optimizer is not None and slot.trainable and slot.tensor.grad is not None:
                raise InstallError(
                    f"the step expects no gradient in {slot.name!r}, found one, which its optimizer would not see: "
                    "call optimizer.zero_grad() first, or leave optimizer out of trace_train_step to accumulate"
                )
        with torch.no_grad():
            results = (self._run or self.graph_module)(*self._inputs(self._batch.laid_out(found.tensors)))
        if self._update.optimizer is None:
            self._hand_over(results[self._returned.num_leaves :])
        else:
            self._update.optimizer.stepped()
        return pytree.tree_unflatten(list(results[: self._returned.num_leaves]), self._returned)

    def compile(
        self, backend: str | Callable[..., Any] = "collective_identity", *, options: Mapping[str, Any] | None = None
    ) -> TrainStep:
        """Compile the graph with a ``torch.compile`` backend; the payloads go with it. Returns this step.

        Args:
            backend: a registered name, or what ``torch.compile(backend=)`` takes.
            options: the backend's own.
        """
        extra = {} if options is None else {"options": dict(options)}
        self._run = compat_step.compiled(self.graph_module, self._inputs(self._batch.tensors), backend, extra)
        return self

    def _inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*(local(slot.tensor) for slot in self._slots), *self._update.tensors(), *tensors]

    def _hand_over(self, gradients: Sequence[torch.Tensor | None]) -> None:
        trained = [slot.tensor for slot in self._slots if slot.trainable]
        for param, gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                continue
            if param.grad is None:
                param.grad = like(gradient, param)
            else:
                local(param.grad).add_(gradient)


def trace_train_step(
    model: nn.Module,
    loss_fn: Loss,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[nn.Module], Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainStep:
    """Trace one training step of a ``fully_shard`` (or ``data_parallel``) model into one FX graph.

    Nothing is executed and no random number is drawn: the step is traced on fake tensors. Between calls the model is
    what it was, eager FSDP2 (or installed): evaluation, checkpoints and eager steps work as ever.

    Args:
        model: the sharded model, materialised.
        loss_fn: ``loss_fn(model, *inputs, **kwargs)`` returns the scalar loss, or a tuple (or list) that begins with
            it. Ordinary PyTorch code; no branch may depend on a tensor's value.
        example_inputs: arguments of ``loss_fn`` after the model; shapes, dtypes and devices are those of every call.
        example_kwargs: its keyword arguments.
        optimizer: its ``step`` becomes part of the graph, after the loss's backward. SGD, Adam, AdamW, RMSprop or
            Adagrad; plain, ``foreach`` or ``fused``. Its learning rates may change between steps. None: gradients are
            handed over as ``backward`` does.
        before_step: ``before_step(model)`` runs in the graph between backward and the optimizer's step, on FSDP2's
            parameters and their gradients: ``lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)``.
        scaler: scales the loss before backward. With an optimizer the gradients are unscaled before ``before_step``,
            a step with inf or NaN changes nothing, and the scale is updated, all in the graph; without one that is
            left to you.

    Returns:
        The step: call it, or ``compile`` it first.

    Raises:
        InstallError: the model is not sharded, is compiled, the loss is not a scalar that needs gradients, or the
            optimizer's parameters are not the model's.
        UnsupportedOption: an FSDP2 option, an optimizer or a hook that a graph cannot honour, gradient sync is off, a
            checkpoint draws random numbers again, or the loss trains a tensor that is not the model's.
    """
    compat.check_version()
    was_installed = is_installed(model)
    if not was_installed:
        install_undeclared(model)
    try:
        slots = slots_of(model)
        update = Update.of(slots, optimizer, before_step, scaler)
        return _trace(TrainStep(model, slots, Batch.of(example_inputs, example_kwargs or {}), update), loss_fn)
    finally:
        if not was_installed:
            uninstall(model)


def _trace(step: TrainStep, loss_fn: Loss) -> TrainStep:
    model, slots, batch = step._model, step._slots, step._batch
    forward_ends = backward_ends = ""
    reopened: Mapping[str, Sequence[str]] = {}

    def run(*inputs: torch.Tensor) -> list[torch.Tensor | None]:
        nonlocal forward_ends, backward_ends, reopened
        parts = list(inputs[: len(slots)])
        for place, slot in enumerate(slots):
            if slot.trainable:
                parts[place] = parts[place].detach().requires_grad_()
        args, kwargs = batch.with_tensors(inputs[len(inputs) - len(batch.tensors) :])
        # in backward too, where checkpoints read parameters again
        with swapped(slots, parts), opened_once(model) as units, torch.enable_grad():
            returned = loss_fn(model, *args, **kwargs)
            leaves, step._returned = pytree.tree_flatten(returned)
            loss = _loss_of(leaves)
            forward_ends = compat_step.last_traced_node()
            traced = step._update.traced(inputs[len(slots) : len(inputs) - len(batch.tensors)])
            trained = [part for part, slot in zip(parts, slots, strict=True) if slot.trainable]
            _check_leaves(loss, trained, slots)
            gradients = torch.autograd.grad(traced.scaled(loss), trained, allow_unused=True)
            backward_ends = compat_step.last_traced_node()
            reopened = {param: unit.reopened for unit in units for param in unit.params}
        outputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if step._update.optimizer is None:
            return [*outputs, *gradients]
        traced.step(model, parts, gradients)
        return outputs

    Standing.of(model)
    kept = Kept(model)
    try:
        step.graph_module = gm = compat_step.traced(run, step._inputs(batch.tensors))
    finally:
        changed = kept.put_back()
    check_writes(changed, gm)
    step._standing = Standing.of(model)
    _check_random(gm, forward_ends, backward_ends)
    ci.normalize(gm)
    forward = gather_again(gm, forward_ends, reopened)
    session = ci.session.ensure()
    declare_step(session, model)
    rows = ci.collective_table(gm)
    name = gm.meta[STEP] = f"{type(model).__name__} step"
    kinds: tuple[tuple[GraphKind, bool], ...] = (("forward", True), ("backward", False))
    for kind, is_forward in kinds:
        log = session.begin_graph(kind, name, "trace_train_step")
        half = tuple(row for row in rows if (row.node in forward) is is_forward)
        log.captured(half)
        log.finish(half)
    return step


def _loss_of(leaves: Sequence[Any]) -> torch.Tensor:
    loss = leaves[0] if leaves else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InstallError(
            "trace_train_step expects loss_fn to return a scalar loss that depends on the parameters, or a tuple "
            f"that begins with it, found {type(loss).__name__}"
            + (f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else "")
        )
    return loss


def _check_leaves(loss: torch.Tensor, trained: Sequence[torch.Tensor], slots: Sequence[Slot]) -> None:
    """Refuse a loss that would bring gradients to tensors which are no inputs of the graph."""
    known, names = {id(part) for part in trained}, {id(slot.tensor): slot.name for slot in slots}
    for leaf in compat_step.leaves_of(loss):
        if id(leaf) not in known:
            name = names.get(id(leaf))
            what = f"a tensor of shape {list(leaf.shape)}" if name is None else f"{name!r}"
            raise UnsupportedOption(
                "trace_train_step expects the loss to train what it reads in the model's forward alone, found "
                f"{what} read from outside it, whose gradient would be lost: make it a parameter of the model and read "
                "it there, or detach it"
            )


def _check_random(gm: fx.GraphModule, forward_ends: str, backward_ends: str) -> None:
    """Refuse a checkpoint that draws its random numbers again: eager sets the generator back, a graph draws others."""
    names = [node.name for node in gm.graph.nodes]
    for node in list(gm.graph.nodes)[names.index(forward_ends) : names.index(backward_ends) + 1]:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise UnsupportedOption(
                f"trace_train_step expects no random numbers in backward, found {node.target}, as an activation "
                "checkpoint draws again for dropout: leave the checkpoint or the dropout out, or train with install"
            )
