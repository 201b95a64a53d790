"""The ``torch.compile`` backend: FSDP collectives labelled, bucketed by role, reported, agreed between ranks.

One :class:`_Compile` per graph that Dynamo hands over. It takes the configuration when it is called and carries
it into every later compile of that graph: a lazy backward may compile in autograd's thread, where the caller's
``config.patch`` is not visible.

Order of one compile: joint graph: equal collectives settled, marks for the partitioner; then for each of forward,
backward and inference: the user's ``pre_passes``, the captured table, and, before Inductor or inside its post-grad
stage (see `_Compile._comes_first`), `passes.graph_passes`, then, where torch's own passes over collectives are on,
`reconcile` around those; then the final table, and before the first run the agreement between ranks.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import fx
from torch._guards import CompileContext

import collective_identity as ci
from collective_identity import compat, session
from collective_identity.codes import DROPPED_UNKNOWN, LITE_SKIPPED, STRUCTURE_MISMATCH, UNWAITED_INPUT
from collective_identity.digest import CollectiveRow
from collective_identity.ledger import STEP, GraphKind, GraphLog
from collective_identity.outside import say_eager_modules
from collective_identity.standing import Place

from . import coverage, upstream
from .contract import GraphPass, PassContext
from .device_policy import compile_under
from .equals import settle_equal_collectives
from .kernels import compile_kernels_of
from .lite_mode import LiteState, Selection, lite_state, marks_digest, prepare, select
from .manager import Pipeline, role_counts, run_user_passes
from .options import BackendOptions, OptionError, parse_options
from .passes import graph_passes
from .profiler_marks import mark_kernel
from .random_in_checkpoints import RandomInCheckpoints
from .reconcile import reconciled
from .reshard import Reshard
from .shards import given_shards, take_shards
from .unseen import unseen
from .upstream_passes import REGIONS, hooks_survive, rewrites_collectives

logger = logging.getLogger("collective_identity.inductor_passes")

NAME = "collective_identity"

Rows = Sequence[CollectiveRow]

_PACKAGES = tuple(
    Path(__file__).parent.parent / name for name in ("collective_identity", "fsdp_hooks", "inductor_passes")
)
_VANISHED = "no collective of its kind that is new carries its role"
_RECOMPILE_TIMEOUT = 5.0  # seconds: a recompile (another batch size) is often one rank's alone


def collective_identity(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend for ``torch.compile(model, backend="collective_identity", mode=..., options={...})``.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs, real or fake tensors.
        mode: a ``torch.compile`` mode, passed on to Inductor.
        options: see :class:`inductor_passes.options.BackendOptions`; other keys are Inductor's.

    Returns:
        The compiled callable.

    Raises:
        OptionError: an unknown option or value, or ``dump`` without a run folder.
        UnsupportedTorch: torch is not 2.11 to 2.15.
        RanksDisagree: on the first run, when another rank compiled something else.
    """
    upstream.check_version()
    return _Compile(gm, example_inputs, parse_options(options, mode)).run()


class _Compile:
    """Everything that belongs to one captured graph."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], options: BackendOptions) -> None:
        self._gm, self._inputs, self._options = gm, inputs, options
        self._lite = select(options.inductor_patches) if options.inner == "inductor" else Selection({}, None)
        self._lite_state = self._lite.state(gm) if options.inner == "inductor" else LiteState.OFF
        if options.policy is not None and self._lite_state is not LiteState.OFF and self._lite.table is None:
            raise OptionError(
                f"option 'policy' expects lite mode with selective_decompose=True or none, found "
                f"{self._lite_state.value}, in which decompositions do not look at marks: leave one of the two out"
            )
        in_marks = options.policy is not None and self._lite_state is not LiteState.OFF  # see compile_under
        self._cacheable = options.cacheable and not in_marks
        self._callers = upstream.callers_config(options.inductor)
        self._session = session.ensure()
        if names := upstream.unwaited_inputs(gm, inputs):
            self._session.ledger.event(UNWAITED_INPUT, detail=f"inputs {', '.join(names)}")
        self._modules = self._session.models_of(inputs)
        self._observe = self._session.mode == "observe"
        if options.dump and self._session.run_dir is None:
            raise OptionError("option 'dump' expects a run folder, found none: open one with enable(run_dir=...)")
        self._step = gm.meta.get(STEP)
        self._name = str(self._step or CompileContext.current_compile_id() or "graph")
        self._tag = self._digest(ci.payload_digest(gm), marks_digest(gm), *map(coverage.describe, inputs))
        self._unseen = unseen(gm, inputs) if options.inner == "inductor" else ()
        self._agreed = (
            f"sources={upstream.source_hash(*_PACKAGES)[:12]} mode={self._session.mode} "
            f"options={hashlib.sha256(self._options.fingerprint().encode()).hexdigest()[:12]} "
            f"parameters={ci.payload_digest(gm, logical_groups=True)[:12]}"
        )
        self._key = coverage.coverage_key(gm, inputs, self._tag)
        self._groups = ci.payload_groups(gm)
        self._recorded: coverage.Tables = coverage.load(self._key) or {}
        self._timeout = self._session.agreement_timeout
        if self._step is None and not self._name.endswith("/0"):
            self._timeout = min(self._timeout, _RECOMPILE_TIMEOUT)
        self._graphs: dict[GraphKind, _Graph] = {}
        self._lock = threading.Lock()
        self._ran = False

    def _digest(self, *captured: str) -> str:
        """Whatever can change the output and is in no key of torch's: sources, session mode, options, payloads.

        A cache key keeps the names of process groups and holds this rank's shard sizes. Ranks compare ``_agreed``
        instead: logical groups, no sizes, and in parts, so that an error says which part differs.
        """
        parts = (upstream.source_hash(*_PACKAGES), self._session.mode, self._options.fingerprint(), *captured)
        return "collective_identity:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _traced_tag(self, gm: fx.GraphModule) -> str:
        """The tag of one traced graph: the trace may have added to it what the captured graph does not hold."""
        return self._digest(self._tag, ci.payload_digest(gm), marks_digest(gm))

    def run(self) -> Callable[..., Any]:
        """Compile, and return what Dynamo calls."""
        start = time.perf_counter()
        inputs, places = take_shards(self._gm, self._inputs)
        if self._unseen and self._cacheable and upstream.autograd_cache_is_on():
            upstream.autograd_cache_bypassed(self._unseen)
            logger.info("%s: not in AOTAutogradCache, whose key does not see %s", self._name, ", ".join(self._unseen))
        with (
            compat.collector_paused(long=True),
            upstream.cache_key(self._tag, self._callers.cache_key_tag),
            upstream.caches_disabled(not self._cacheable),
            upstream.autograd_cache_disabled(bool(self._unseen)),
            upstream.joint_pass(self._joint),
        ):
            if self._options.inner == "inductor":
                compiled = compile_under(
                    self._options.policy, self._gm, inputs, self._around, self._lite.options, self._lite.table
                )
            else:
                compiled = upstream.aot_eager(self._gm, inputs, self._eager_graph)
        if not self._graphs:
            self._from_cache(time.perf_counter() - start)
        del self._gm, self._inputs  # the compiled callable keeps this object
        return self._checked(given_shards(compiled, places))

    # -- the stages ---------------------------------------------------------------------------------------------

    def _joint(self, gm: fx.GraphModule) -> None:
        settle_equal_collectives(gm, inductor=self._options.inner == "inductor")
        passes: list[GraphPass] = [RandomInCheckpoints()] if upstream.misplaced_random_ops(gm) else []
        if self._options.reshard:
            passes.append(Reshard())
        if passes:
            with self._lite.as_asked():
                lite = lite_state(gm)
                log = self._session.begin_graph("joint", self._name, NAME, lite=lite.value, modules=self._modules)
                context = self._context("joint", lite, log)
                Pipeline(passes).run(gm, context, recompile=False)  # the partitioner reads the graph

    def _around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            with (
                compat.collector_paused(long=True),  # a backward compiles later than the rest
                self._lite.as_asked(),
                self._graph(upstream.kind_of_inner(kwargs), gm) as graph,
                upstream.cache_key(self._traced_tag(gm), self._callers.cache_key_tag),
                upstream.caches_disabled(not self._cacheable),
                graph.upstreams(),
                upstream.called_kernels(mark_kernel, self._tag),
                self._passes_of(graph, gm),
            ):
                if graph.lite is not LiteState.OFF:
                    prepare(gm)
                return inner(gm, inputs, *args, **kwargs)

        return compile_graph

    def _passes_of(self, graph: _Graph, gm: fx.GraphModule) -> AbstractContextManager[None]:
        """Run our passes now, or have them run in Inductor's post-grad stage, behind the user's."""
        if self._comes_first(graph):
            graph.transform(gm)
            return nullcontext()
        return upstream.post_grad_pass(graph.transform, self._tag, self._callers.post_grad_passes)

    def _comes_first(self, graph: _Graph) -> bool:
        """Whether our passes run before Inductor, which looks at every node once then, and not again at new ones.

        Not where a pass of the user's comes first, nodes are put in another order after that, or the stage is off.
        """
        if graph.not_run or self._callers.post_grad_passes or graph.lite is not LiteState.OFF:
            return False
        in_order = "reorder_for_locality" if graph.kind in ("inference", "step") else "reorder_for_locality_in_training"
        return not (upstream.inductor_option_exists(in_order) and upstream.inductor_flag(in_order))

    def _eager_graph(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        with compat.collector_paused(long=True), self._graph(kind, gm) as graph:
            graph.transform(gm)

    # -- one graph ----------------------------------------------------------------------------------------------

    @contextmanager
    def _graph(self, kind: GraphKind, gm: fx.GraphModule) -> Iterator[_Graph]:
        """The log of one graph's compile, closed however that ends."""
        if kind == "inference" and self._step is not None:
            kind = "step"
        lite = lite_state(gm)  # before any pass, none of which can make it another
        log = self._session.begin_graph(kind, self._name, NAME, lite=lite.value, modules=self._modules)
        start = time.perf_counter()
        try:
            if self._options.dump:
                log.dump(gm)
            graph = _Graph(gm, self._context(kind, lite, log), log, self._not_run(lite))
            self._graphs[kind] = graph
            yield graph
        except BaseException as error:
            log.failed(error, compile_seconds=time.perf_counter() - start)
            raise
        self._finish(graph, time.perf_counter() - start)

    def _not_run(self, lite: LiteState) -> str:
        """Why passes that change the graph do not run, empty when they do."""
        if lite is not LiteState.OFF:
            return f"lite mode: {lite.value}"
        name = "use_post_grad_passes"
        off = self._options.inner == "inductor" and not self._lite.options.get(name, upstream.inductor_flag(name))
        return f"{name}=False" if off else ""

    def _context(self, kind: GraphKind, lite: LiteState, log: GraphLog) -> PassContext:
        return PassContext(kind=kind, lite=lite, observe=self._observe, options=self._options, log=log)

    def _finish(self, graph: _Graph, seconds: float) -> None:
        if not graph.transformed:
            self._recorded = coverage.load(self._key) or self._recorded  # another rank may just have stored it
        elif self._cacheable:
            coverage.save(self._key, {kind: (g.before, g.after) for kind, g in self._graphs.items() if g.transformed})
        graph.finish(seconds, self._recorded.get(graph.kind))
        graph.publish(self._agreed)
        with self._lock:
            late = self._ran
        if late:  # a lazy backward: its first run is next
            self._agree(graph)

    def _from_cache(self, seconds: float) -> None:
        """AOTAutograd took the whole compile from its cache: none of our passes saw a graph."""
        if not self._recorded:
            kind: GraphKind = "forward" if self._step is None else "step"
            log = self._session.begin_graph(kind, self._name, NAME, modules=self._modules)
            log.finish((), cached=True, lite=self._lite_state.value, compile_seconds=seconds)
            self._graphs[kind] = _Graph.unknown(log, self._groups)
            self._graphs[kind].publish(self._agreed)
        for kind, (before, after) in self._recorded.items():
            log = self._session.begin_graph(kind, self._name, NAME, modules=self._modules)
            log.captured(before)
            if self._lite_state is not LiteState.OFF:
                log.event(LITE_SKIPPED, detail=f"lite mode: {self._lite_state.value}")
            log.finish(after, cached=True, lite=self._lite_state.value, compile_seconds=seconds)
            self._graphs[kind] = _Graph.recorded(log, before, after)
            self._graphs[kind].publish(self._agreed)
            seconds = 0.0

    def _checked(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        service = self._session.ledger.service
        standing = service.standing if service is not None and service.start() else None
        first = next((graph for kind, graph in self._graphs.items() if kind != "backward"), None)

        def run(*args: Any) -> Any:
            if not self._ran:
                self._before_first_run()
            if standing is None or first is None:
                return compiled(*args)
            return standing.call(compiled, args, first.place, self._backward_place)

        return run

    def _backward_place(self) -> Place | None:
        graph = self._graphs.get("backward")
        return None if graph is None else graph.place

    def _before_first_run(self) -> None:
        with self._lock:
            if self._ran:
                return
            self._ran = True
        say_eager_modules(self._session.ledger)
        for graph in list(self._graphs.values()):
            self._agree(graph)

    def _agree(self, graph: _Graph) -> None:
        """Compare one graph with the other ranks; a compile that they did not come to is waited for only once."""
        if graph.agree(self._agreed, self._timeout) == "timeout":
            self._timeout = 0.0


class _Graph:
    """One forward, backward, inference or step graph: before, transformed, after."""

    def __init__(self, gm: fx.GraphModule, context: PassContext, log: GraphLog, not_run: str = "") -> None:
        self.kind, self.lite, self._context, self._log = context.kind, context.lite, context, log
        self.not_run = not_run
        self._pipeline = Pipeline(graph_passes(context.options))
        self._upstreams: ExitStack | None = None
        self.transformed = False
        self.rows_known = True
        self._groups: tuple[str, ...] | None = None
        for name, loss, node in run_user_passes(gm, context.options.pre_passes):
            log.event(DROPPED_UNKNOWN, node=node, role=loss.identity.role, pass_name=name, detail=_VANISHED)
        self.before: Rows = log.captured(self._look(gm))
        self.after: Rows = self.before

    @classmethod
    def recorded(cls, log: GraphLog, before: Rows, after: Rows) -> _Graph:
        """A graph taken from the cache, whose tables were recorded when it was made."""
        graph = cls.__new__(cls)
        graph._log, graph.before, graph.after = log, before, after
        graph.transformed = graph.rows_known = True
        graph._groups = None
        return graph

    @classmethod
    def unknown(cls, log: GraphLog, groups: tuple[str, ...]) -> _Graph:
        """A graph taken from the cache without a record; ``groups`` are the producer's process groups."""
        graph = cls.recorded(log, (), ())
        graph.rows_known = False
        graph._groups = groups
        return graph

    def _look(self, gm: fx.GraphModule) -> Rows:
        """Classify without writing, and say what is wrong."""
        with compat.timed("collective_identity.classify"):
            seen = ci.classify_report(gm)
        for node, absence in seen.absences.items():
            if absence.code is not None:
                self._log.event(absence.code, node=node, pass_name=absence.pass_name, detail=absence.detail)
        said = set(seen.normalization.refused.values())
        for removal in seen.normalization.removals:
            if removal.code.severity != "info" and removal not in said:
                self._log.event(removal.code, node=removal.node, detail=removal.detail)
        for mismatch in seen.mismatches:
            self._log.event(STRUCTURE_MISMATCH, node=mismatch.node, role=mismatch.identity.role, detail=mismatch.detail)
        for node, note in seen.notes:
            self._log.event(note, node=node)
        return ci.collective_table(gm, seen)

    def transform(self, gm: fx.GraphModule) -> None:
        """Run the passes on the graph about to be lowered; where torch's own follow, watch them from here on."""
        with compat.timed("collective_identity.passes"):
            self._pipeline.run(gm, self._context, recompile=False)  # Inductor's stage, or aot_eager, ends with that
            self.after = ci.collective_table(gm)
            if upstream.inductor_flag("worker_start_method") != "fork":  # a fork copies what threads hold, not threads
                compile_kernels_of(gm)
        self.transformed = True
        if self._upstreams is not None and not self._context.read_only and rewrites_collectives():
            if hooks_survive():
                self._upstreams.enter_context(self._reconciled(gm))
            else:
                logger.warning("%s graph: torch's scheduler is not watched, set %s=False", self.kind, REGIONS)

    @contextmanager
    def upstreams(self) -> Iterator[None]:
        """Around Inductor's compile of one graph: what torch's own passes do to identities is put right at its end."""
        with ExitStack() as self._upstreams:
            yield

    @contextmanager
    def _reconciled(self, gm: fx.GraphModule) -> Iterator[None]:
        before = role_counts(gm)
        with reconciled(gm, self._log.event) as done:
            yield
        self.after = ci.collective_table(gm)
        changed = bool(done.merged or done.replaced or done.cleared or done.lost)
        self._log.pass_ran("reconcile", done.seconds, changed, before, role_counts(gm), done.to_dict())

    def finish(self, seconds: float, recorded: tuple[Rows, Rows] | None) -> None:
        """Close the log. Passes that did not run were switched off, or the graph was taken from FxGraphCache."""
        lite = self._context.lite
        cached = not self.transformed and not self.not_run
        if cached and recorded is not None and recorded[0] == self.before:
            self.after = recorded[1]
        elif cached:
            self.rows_known = False
        elif self.not_run:
            self._log.event(LITE_SKIPPED, detail=self.not_run)
        self.after = self._log.finish(self.after, cached=cached, lite=lite.value, compile_seconds=seconds)

    @property
    def place(self) -> Place:
        """Which graph this is, where a rank stands in it."""
        return self._log.shared.place

    def publish(self, tag: str) -> None:
        """Let the other ranks know of it, without waiting."""
        self._log.publish(self.after, tag=tag, cached=not self.rows_known, groups=self._groups)

    def agree(self, tag: str, timeout: float) -> str:
        """Compare with the other ranks, and return the verdict; raises on every rank when they differ."""
        cached = not self.rows_known
        return self._log.agree(self.after, tag=tag, cached=cached, groups=self._groups, timeout=timeout).status
