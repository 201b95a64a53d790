"""Runs passes in a checked order: what each needs, what lite mode and observe sessions allow, what it did."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from collective_identity import classify
from collective_identity.compat import collector_paused
from collective_identity.losses import Loss, record_losses, snapshot

from .contract import GraphPass, LiteBehaviour, PassContext, PassOutcome
from .lite_mode import Guard, LiteState, check_result, lite_parts, lite_state

logger = logging.getLogger("collective_identity.inductor_passes")


class ScheduleError(ValueError):
    """A pipeline that cannot run in this order."""


class PassError(RuntimeError):
    """A pass raised; the message ends with its name."""


class Pipeline:
    """An ordered tuple of passes of one stage, validated when built."""

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        """
        Raises:
            ScheduleError: a pass needs what none before it provides, two share a name, or stages are mixed.
        """
        provided: set[str] = set()
        ran: list[str] = []
        for one in passes:
            contract = one.contract
            missing = sorted(contract.requires - provided)
            if missing:
                raise ScheduleError(
                    f"pass {contract.name!r} requires {', '.join(missing)}, which none of {ran or 'no pass'} provides: "
                    "put the pass that provides it before this one"
                )
            if contract.name in ran:
                raise ScheduleError(f"pass {contract.name!r} is scheduled twice: give each pass a name of its own")
            if not isinstance(contract.lite, LiteBehaviour):
                raise ScheduleError(
                    f"pass {contract.name!r} declares lite={contract.lite!r}: "
                    f"expected one of {', '.join(map(str, LiteBehaviour))}"
                )
            if contract.stage != passes[0].contract.stage:
                raise ScheduleError(
                    f"pass {contract.name!r} runs on the {contract.stage} stage, {ran[0]!r} on "
                    f"{passes[0].contract.stage}: schedule the stages apart"
                )
            provided |= contract.provides
            ran.append(contract.name)
        self.passes = tuple(passes)

    def run(self, gm: fx.GraphModule, context: PassContext, *, recompile: bool = True) -> bool:
        """Run the passes on ``gm``.

        Args:
            gm: the graph.
            context: what the passes are told.
            recompile: generate the code of a graph that changed; not where the caller does so later.

        Returns:
            Whether any pass changed the graph.

        Raises:
            PassError: a pass raised, or left an invalid graph.
        """
        changed_any = False
        regions, guard = lite_parts(gm), Guard()  # before any pass: none can make a region another
        counted: Mapping[str, int] | None = None  # what the pass before left, if that was counted
        for one in self.passes:
            if self._may_run(one, context):
                changed, counted = self._run_one(one, gm, context, regions, guard, counted)
                changed_any |= changed
        if changed_any and recompile:
            gm.recompile()  # once: passes read the graph, not its code
        return changed_any

    @staticmethod
    def _may_run(one: GraphPass, context: PassContext) -> bool:
        return not (context.read_only and one.contract.lite is LiteBehaviour.SKIP)

    @staticmethod
    def _run_one(
        one: GraphPass,
        gm: fx.GraphModule,
        context: PassContext,
        regions: tuple[fx.GraphModule, ...],
        guard: Guard,
        counted: Mapping[str, int] | None,
    ) -> tuple[bool, Mapping[str, int] | None]:
        name = one.contract.name
        before = role_counts(gm) if counted is None else counted
        start = time.perf_counter()
        try:
            with collector_paused():
                outcome = _guarded_run(one, gm, context, regions, guard)
                if outcome.changed:
                    gm.graph.lint()
        except Exception as error:
            raise PassError(f"{type(error).__name__}: {error} (in the {context.kind} graph, pass {name!r})") from error
        seconds = time.perf_counter() - start
        counted = role_counts(gm) if outcome.changed else None
        if context.log is not None:
            after = before if counted is None else counted
            context.log.pass_ran(name, seconds, outcome.changed, before, after, outcome.summary)
        logger.debug("%s graph: pass %s took %.1f ms, changed=%s", context.kind, name, 1e3 * seconds, outcome.changed)
        return outcome.changed, counted


def _guarded_run(
    one: GraphPass, gm: fx.GraphModule, context: PassContext, regions: tuple[fx.GraphModule, ...], guard: Guard
) -> PassOutcome:
    """Nothing may change in lite mode and its ``regions``; in an observe session, except what belongs to capture."""
    name, lite = one.contract.name, context.lite is not LiteState.OFF
    if lite or (context.observe and one.contract.lite is not LiteBehaviour.CAPTURE):
        fixed = tuple(part for part in gm.modules() if isinstance(part, fx.GraphModule))
    else:
        fixed = regions
    why = "lite mode" if lite or not context.observe else "an observe session"
    with guard.around(fixed, name, why=why):
        outcome = one(gm, context)
    if fixed:
        check_result(outcome, gm, name, why=why)
    return outcome


def role_counts(gm: fx.GraphModule) -> Mapping[str, int]:
    """How many start nodes carry each role; ``""`` counts those with none."""
    return Counter("" if identity is None else identity.role for identity in classify(gm).values())


def run_user_passes(
    gm: fx.GraphModule, passes: Iterable[Callable[[fx.GraphModule], object]]
) -> list[tuple[str, Loss, fx.Node]]:
    """Run a user's own callables on the graph, check what they left, and record the identities they lost.

    In lite mode they may look and not write, like every other pass.

    Returns:
        Pass, loss and the erased node of each identity that left no collective without one behind, where no new
        collective of its kind carries its role: a merge that kept another member's.
    """
    vanished: list[tuple[str, Loss, fx.Node]] = []
    parts, lite = lite_parts(gm), lite_state(gm)  # before any pass: none can make the graph another
    guard = Guard()
    for one in passes:
        name = getattr(one, "__qualname__", type(one).__qualname__)
        before = snapshot(gm)
        try:
            with guard.around(parts, name, exempt=False):
                result = one(gm)
            if lite is not LiteState.OFF:
                check_result(result, gm, name)
            gm.graph.lint()
        except Exception as error:
            raise PassError(f"{type(error).__name__}: {error} (in a pre_pass of the user, {name!r})") from error
        gm.recompile()
        losses = record_losses(before, gm, pass_name=name)
        for loss in losses:
            logger.debug("pre_pass %s lost %s of %s", name, loss.identity.role, loss.was)
        known = {seen.node for seen in before}
        merged = {
            (*seen.signature[:2], seen.identity.role)
            for seen in snapshot(gm)
            if seen.node not in known and seen.identity is not None
        }
        was = {seen.name: seen for seen in before}
        vanished += [
            (name, loss, was[loss.was].node)
            for loss in losses
            if loss.node is None and (*was[loss.was].signature[:2], loss.identity.role) not in merged
        ]
    return vanished
