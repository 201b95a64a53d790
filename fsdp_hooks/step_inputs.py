"""What of a training step is data, and what is fixed when it is traced?

A step reads and writes the shards of parameters, the buffers and the optimizer's state in place: they are inputs of
its graph, as the batch is. Everything else, hyperparameters and arguments that are no tensors, is fixed and compared
at every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .compat_step import storage_of
from .errors import InstallError, UnsupportedOption
from .runtime import BINDINGS
from .step_writes import refused

TENSOR = object()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's storage of a tensor, without autograd."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as ``whole`` that holds ``part`` on this rank."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class _Shard:
    """Stands for a sharded parameter while a step is traced; only the model's own forward may read it."""

    def __init__(self, part: torch.Tensor, name: str) -> None:
        self._part, self._name = part, name
        self.requires_grad = part.requires_grad

    def to_local(self) -> torch.Tensor:
        """The traced part."""
        return self._part

    def _refuse(self, *args: Any) -> Any:
        raise UnsupportedOption(
            f"trace_train_step expects parameters to be read in the model's forward, found {self._name!r} read outside "
            "it, by the loss function: move what needs it into a module's forward, or into before_step"
        )

    __getattr__ = __add__ = __sub__ = __mul__ = __rmul__ = __matmul__ = __pow__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(one for one in pytree.tree_leaves(args) if isinstance(one, cls))._refuse()


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer, and every module attribute that holds it."""

    tensor: torch.Tensor
    owners: tuple[tuple[dict[str, Any], nn.Module, str], ...]
    name: str

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad

    def put(self, part: torch.Tensor) -> None:
        """Have the modules read ``part`` instead."""
        for table, module, name in self.owners:
            gathered = name in module.__dict__.get(BINDINGS, ())
            table[name] = _Shard(part, self.name) if gathered else like(part, self.tensor)

    def put_whole(self, part: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """Have the modules read the tensor as it is outside forward, around ``part``, with its gradient; returns it."""
        whole = like(part.detach(), self.tensor)
        if isinstance(self.tensor, nn.Parameter):
            whole.requires_grad_(self.trainable)._is_param = True  # type: ignore[attr-defined]
        whole.grad = None if gradient is None else like(gradient, self.tensor)
        for table, _, name in self.owners:
            table[name] = whole
        return whole

    def put_back(self) -> None:
        """Have the modules read the tensor itself again."""
        for table, _, name in self.owners:
            table[name] = self.tensor


def slots_of(model: nn.Module) -> tuple[Slot, ...]:
    """Every parameter, then every buffer of a model; tied ones once, by their first name."""
    found: dict[int, tuple[torch.Tensor, list[tuple[dict[str, Any], nn.Module, str]], str]] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, module in model.named_modules():
            table = getattr(module, kind)
            for name, tensor in table.items():
                if tensor is not None:
                    fqn = f"{prefix}.{name}" if prefix else name
                    found.setdefault(id(tensor), (tensor, [], fqn))[1].append((table, module, name))
    return tuple(Slot(tensor, tuple(owners), fqn) for tensor, owners, fqn in found.values())


@contextmanager
def standing_in(
    slots: Sequence[Slot], parts: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Iterator[list[torch.Tensor]]:
    """Have the model hold what it holds outside forward, around ``parts``; yields the trainable parameters.

    FSDP2's own parameters have the same gradients meanwhile, for code that kept them: an optimizer's groups, a list.
    """
    given = iter(gradients)
    held = [slot.tensor.grad for slot in slots]
    try:
        whole = [
            slot.put_whole(part, next(given) if slot.trainable else None)
            for slot, part in zip(slots, parts, strict=True)
        ]
        for slot, one in zip(slots, whole, strict=True):
            slot.tensor.grad = one.grad
        yield [one for slot, one in zip(slots, whole, strict=True) if slot.trainable]
    finally:
        for slot, gradient in zip(slots, held, strict=True):
            slot.put_back()
            slot.tensor.grad = gradient


@contextmanager
def swapped(slots: Sequence[Slot], parts: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have the model read ``parts`` instead of its own tensors.

    Raises:
        UnsupportedOption: it put another tensor in the place of one of them.
    """
    try:
        for slot, part in zip(slots, parts, strict=True):
            slot.put(part)
        put = [(slot, table, name, table[name]) for slot in slots for table, _, name in slot.owners]
        storages = [storage_of(part) for part in parts]
        yield
        moved = [slot for slot, part, was in zip(slots, parts, storages, strict=True) if storage_of(part) != was]
        for slot in [*(slot for slot, table, name, one in put if table.get(name) is not one), *moved]:
            raise refused(slot.name, "its tensor")
    finally:
        for slot in slots:
            slot.put_back()


@dataclass(frozen=True)
class Batch:
    """The arguments of a step, taken apart: tensors, and what is fixed."""

    tensors: tuple[torch.Tensor, ...]
    fixed: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Take arguments apart, nested containers as well."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(tensors, tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves), spec)

    def laid_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Other tensors, in memory as these are, which a graph's views count on; copied only where they differ."""
        pairs = zip(tensors, self.tensors, strict=True)
        return [one if one.stride() == traced.stride() else _strided(one, traced) for one, traced in pairs]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """``(args, kwargs)`` with other tensors."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if one is TENSOR else one for one in self.fixed], self.spec)

    def described(self) -> Batch:
        """The same without the memory of its tensors."""
        return Batch(tuple(one.new_empty(1).expand(one.shape) for one in self.tensors), self.fixed, self.spec)

    def like(self, found: Batch) -> bool:
        """Whether another batch has the structure, shapes, dtypes, devices and fixed values of this one."""
        return self._difference(found) is None

    def expect(self, found: Batch) -> None:
        """Compare with the batch that the step was traced with; ``self`` is that one.

        Raises:
            InstallError: other structure, shapes, dtypes, devices or fixed values.
        """
        difference = self._difference(found)
        if difference is not None:
            raise InstallError(f"the step expects {difference}")

    def _difference(self, found: Batch) -> str | None:
        if self.spec != found.spec or len(self.tensors) != len(found.tensors):
            return f"arguments as it was traced with, {self.spec}, found {found.spec}: trace it again"
        for place, (a, b) in enumerate(zip(self.tensors, found.tensors, strict=True)):
            if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
                return (
                    f"tensor {place} of its arguments to be {_say(a)}, as it was traced, found {_say(b)}: trace a step "
                    "for each shape, or pad the batch"
                )
        for a, b in zip(self.fixed, found.fixed, strict=True):
            if a is not b and not _equal(a, b):
                return (
                    f"the argument {a!r} that it was traced with, found {b!r}: what is no tensor is part of the graph; "
                    "trace it again, or pass a tensor"
                )
        return None


def _strided(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if any(stride == 0 and size > 1 for stride, size in zip(like.stride(), like.shape, strict=True)):
        return tensor.contiguous()  # the example was expanded: one number for many, which cannot hold these
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(tensor)


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # an argument of any type
        return False


def _say(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
