"""How many collectives of each role one training step of a sharded model issues, read from FSDP2 alone.

Independent of the capture: it walks FSDP2's parameter groups, mesh and options, never a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from collective_identity.ledger import Expectation, ExpectedRow
from collective_identity.reporting.records import ExpectedRecord, GraphRecord
from collective_identity.session import Session

from .data_parallel_record import data_parallel_specs
from .spec import ParamSpec
from .survey import specs_of

_Key = tuple[str, str, str, str]  # role, phase, parameter group, dtype


def expected_collectives(model: nn.Module, *, saved_for_backward: Collection[str] | None = None) -> Expectation:
    """The collectives of one forward and backward, by role, phase, parameter group and wire dtype.

    Args:
        model: a ``fully_shard`` model, installed or not, or one given to ``data_parallel``.
        saved_for_backward: fully qualified names of the parameters whose *values* backward needs; only these are
            gathered again after a reshard. None: not known, and the re-gather counts are left open.

    Returns:
        One row per role, phase, parameter group and dtype: ``count`` collectives before bucketing (one a
        parameter) and ``buckets`` after (one).
    """
    specs = data_parallel_specs(model) or specs_of(model)
    counts: Counter[_Key] = Counter()
    unknown: set[_Key] = set()
    for spec in specs:
        args = spec.args
        if args.group_size > 1:
            counts[PARAM_UNSHARD, "forward", args.param_group, str(spec.gather_dtype)] += 1
            if args.reshard_after_forward:
                key = (PARAM_UNSHARD, "regather", args.param_group, str(spec.gather_dtype))
                if saved_for_backward is None:
                    unknown.add(key)
                elif spec.fqn in saved_for_backward:
                    counts[key] += 1
        if spec.trainable and args.sync != "none":
            if args.group_size > 1:
                counts[GRAD_REDUCE_SHARD, "backward", args.param_group, str(spec.reduce_dtype)] += 1
            if args.replicate_group is not None and args.sync == "all":
                counts[GRAD_REPLICATE_REDUCE, "backward", args.param_group, str(spec.reduce_dtype)] += 1
    rows = [
        ExpectedRow(role=role, phase=phase, param_group=group, dtype=dtype, count=count, buckets=1)
        for (role, phase, group, dtype), count in counts.items()
    ]
    rows += [
        ExpectedRow(role=role, phase=phase, param_group=group, dtype=dtype, count=None, buckets=None)
        for role, phase, group, dtype in sorted(unknown)
    ]
    first = specs[0].args
    world = {"shard": first.group_size, "replicate": first.replicate_size}
    return Expectation(model=type(model).__name__ + _without(specs), world=world, rows=tuple(rows))


def declare_again(session: Session, expected: Expectation, model: nn.Module) -> None:
    """Declare what a step issues from now on, after an option changed.

    Under a name of its own once graphs were compiled: the report compares each step with what fits it.
    """
    expected, _ = session.ledger.models.named(expected, model)
    records = session.ledger.records()
    ours = [r for r in records if isinstance(r, ExpectedRecord) and r.model.split(" #")[0] == expected.model]
    if not expected.rows or any(r.rows == expected.rows for r in ours):
        return
    if ours and any(isinstance(r, GraphRecord) for r in records[records.index(ours[-1]) :]):
        expected = replace(expected, model=f"{expected.model} #{len({r.model for r in ours}) + 1}")
    elif ours:
        expected = replace(expected, model=ours[-1].model)
    session.declare(expected, model)


def declare_step(session: Session, model: nn.Module) -> None:
    """Declare what the whole-step graph of ``model`` holds: gradients reduced in one buffer, as eager FSDP2 does.

    What was declared for the model itself is taken back if nothing was compiled since: this step may be all there is.
    """
    expected, _ = session.ledger.models.named(expected_collectives(model), model)
    records = session.ledger.records()
    alone = [at for at, r in enumerate(records) if isinstance(r, ExpectedRecord) and r.model == expected.model]
    if alone and not any(isinstance(r, GraphRecord) for r in records[alone[-1] :]):
        session.declare(replace(expected, rows=()), model)
    rows = tuple(row if row.role == PARAM_UNSHARD else replace(row, count=row.buckets) for row in expected.rows)
    declare_again(session, replace(expected, model=f"{expected.model} step", rows=rows), model)


def _without(specs: Sequence[ParamSpec]) -> str:
    """Steps that leave communication out are declared beside those that do not."""
    said = {"none": ", some gradients not reduced", "shard": ", some gradients not all-reduced"}
    return "".join(text for sync, text in said.items() if any(s.args.sync == sync for s in specs if s.trainable))
