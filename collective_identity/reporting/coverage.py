"""Do the graphs hold the collectives that the producers declared? Expected against found, by role and
phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .. import codes
from .records import ExpectedRecord
from .steps import PHASES, Cell, Step, Tally, merged, tally

NOTHING_SEEN = (
    "no graph holds an FSDP collective and no producer declared any: a model sharded over one rank has none; for "
    "another with fully_shard, call fsdp_hooks.install(model) before torch.compile"
)


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """One role in one phase of the step shown. None means unknown: not declared, from cache, or not
    compiled yet.

    `captured` = `explicit` + `inferred`. `malformed` (payload refuted) may overlap `inferred`: structure
    may have stood in. `unlabelled` are look-alikes on the same group that never had a payload. `dropped`
    counts losses by code. `not_captured` is what is left of `expected` after all of these.
    """

    role: str
    phase: str
    expected: int | None
    captured: int | None
    explicit: int
    inferred: int
    malformed: int
    unlabelled: int
    dropped: Mapping[str, int]
    not_captured: int | None
    buckets_expected: int | None
    after: int | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """`rows` for the steps shown, one per declared model (the one furthest from what was declared, else the
    last); `failures` of every step; `other` counts collectives that are not FSDP by role, "(transport)"
    without one."""

    rows: tuple[CoverageRow, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    other: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Want:
    """The sum of some declarations: counts by (role, phase) and by parameter group, None once one is
    unknown."""

    models: tuple[str, ...]
    modules: tuple[str, ...]
    count: Mapping[Cell, int | None]
    buckets: Mapping[Cell, int | None]
    groups: Mapping[tuple[str, str, str | None], int | None]


def cover(steps: Sequence[Step], declared: Iterable[ExpectedRecord]) -> Coverage:
    """Compare the steps with the declarations.

    A later declaration of a model replaces an earlier one; one without rows only takes it back.
    """
    latest = {record.model: record for record in declared}
    latest = {model: record for model, record in latest.items() if record.rows}
    wants = [_want((record,)) for record in latest.values()]
    for several in _together(steps, latest.values()):
        wants.append(_want(several))
    counted = [(step, tally(step)) for step in steps if step.known]
    holding = [(step, t) for step, t in counted if t.has_fsdp or any(t.malformed.values())]
    if (
        not holding and wants
    ):  # every payload gone and nothing that looks like FSDP: in the graphs all the same?
        loose = [(step, tally(step, any_group=True)) for step, _ in counted]
        holding = [(step, t) for step, t in loose if sum(t.absent.values())]
    notes = [f"{step.name}: only its backward was seen" for step in steps if step.kind == "backward"]
    if not wants:
        shown = [pair for pair in holding or counted if pair[0].kind == "training"] or holding or counted
        rows = _rows([(None, *shown[-1])]) if shown else ()
        if holding:
            notes.append("no producer declared what to expect: nothing to compare with")
        elif counted:
            notes.append(NOTHING_SEEN)
        return Coverage(rows, (), tuple(dict.fromkeys(notes)), shown[-1][1].other if shown else {}, len(steps))

    taken: dict[int, list[tuple[list[str], Step, Tally]]] = {}
    for step, t in _whole_steps(holding, wants):
        uses = {i: len(taken.get(i, ())) for i in range(len(wants))}
        best = min(_asked(step, wants), key=lambda i: (len(_differences(wants[i], step, t)), uses[i]))
        taken.setdefault(best, []).append((_differences(wants[best], step, t), step, t))
    failures = []
    for i, found in taken.items():
        for _, step, t in found:
            failures += _differences(wants[i], step, t, short=True)
            notes += _beyond(wants[i], step, t)
            notes += _never_again(wants[i], step, t)
    matched = {model for i in taken for model in wants[i].models}
    shown_pairs = []
    for i, found in taken.items():
        texts, step, t = max(found, key=lambda f: (len(f[0]), f[1].kind == "training", len(f[1].phases)))
        if not texts:
            _, step, t = max(reversed(found), key=lambda f: (f[1].kind == "training", len(f[1].phases)))
        shown_pairs.append((wants[i], step, t))
    for i, want in enumerate(wants[: len(latest)]):
        if want.models[0] in matched:
            continue
        hidden = any(_from_cache(step) and i in _asked(step, wants) for step in steps)
        if hidden:
            notes.append(f"{want.models[0]}: from cache, so what was captured is unknown")
        elif not want.count:
            notes.append(f"{want.models[0]}: declared no collectives, and no graph holds any: one rank a group")
        else:
            n = sum(v or 0 for v in want.count.values())
            failures.append(
                f"{codes.NOT_CAPTURED.id} {codes.NOT_CAPTURED.slug}: {want.models[0]}: expected {n} "
                f"collectives in a step, "
                f"found no compiled graph that holds any. torch.compile the whole model with "
                "backend='collective_identity'"
            )
        shown_pairs.append(
            (want, Step(want.models[0], "training", (), frozenset() if hidden else _ALL), _NOTHING)
        )
    rows = _rows(shown_pairs)
    notes += [
        f"{row.role}, {row.phase}: {row.after} after the passes, {row.buckets_expected} natural buckets"
        for row in rows
        if row.after is not None and row.buckets_expected is not None and row.after > row.buckets_expected
    ]
    other: Counter[str] = Counter()
    for _, _, t in shown_pairs:
        other.update(t.other)
    return Coverage(rows, tuple(failures), tuple(dict.fromkeys(notes)), other, len(steps))


_ALL = frozenset(PHASES)
_NOTHING = tally(Step("", "training", (), frozenset()))


def _want(records: Sequence[ExpectedRecord]) -> _Want:
    count: dict[Cell, int | None] = {}
    buckets: dict[Cell, int | None] = {}
    groups: dict[tuple[str, str, str | None], int | None] = {}
    for record in records:
        for row in record.rows:
            cell = (row.role, row.phase)
            count[cell] = _plus(count.get(cell, 0), row.count)
            buckets[cell] = _plus(buckets.get(cell, 0), row.buckets)
            key = (*cell, row.param_group)
            groups[key] = _plus(groups.get(key, 0), row.count)
    modules = tuple(sorted({r.module for r in records if r.module is not None}))
    return _Want(tuple(r.model for r in records), modules, count, buckets, groups)


def _together(steps: Sequence[Step], declared: Iterable[ExpectedRecord]) -> Iterator[tuple[ExpectedRecord, ...]]:
    """The declarations that one step may hold at once: all, or of the models whose parameters it is known to take."""
    records = tuple(declared)
    newest = {record.module: record for record in records}
    if len(records) > 1:
        yield records
    for names in dict.fromkeys(step.modules for step in steps if len(step.modules) > 1):
        if names != tuple(sorted(newest, key=str)):
            yield tuple(newest[name] for name in names if name in newest)


def _asked(step: Step, wants: Sequence[_Want]) -> list[int]:
    """The places of the wants that may speak of this step: those of its models, where these are known."""
    own = [i for i, want in enumerate(wants) if want.modules and want.modules == step.modules]
    return own or list(range(len(wants)))


def _from_cache(step: Step) -> bool:
    """Whether what the step holds is unknown because it came from a cache."""
    return not step.known and any(graph.cached for graph in step.parts)


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _whole_steps(
    holding: Sequence[tuple[Step, Tally]], wants: Sequence[_Want]
) -> Iterator[tuple[Step, Tally]]:
    """The steps, and where a model was split over several graphs these as one; model by model where it is known."""
    apart = all(len(step.modules) == 1 for step, _ in holding)
    groups: dict[tuple[str, ...], list[tuple[Step, Tally]]] = {}
    for pair in holding:
        groups.setdefault(pair[0].modules if apart else (), []).append(pair)
    for own in groups.values():
        whole = _split_over_graphs(own, [wants[i] for i in _asked(own[0][0], wants)] if apart else wants)
        yield from own if whole is None else (whole,)


def _split_over_graphs(
    holding: Sequence[tuple[Step, Tally]], wants: Sequence[_Want]
) -> tuple[Step, Tally] | None:
    """The training steps as one, when only together they are what one of the declarations says, or pieces of it."""
    training = [step for step, _ in holding if step.kind == "training"]
    if len(training) < 2 or len(training) < len(holding):
        return None
    whole = merged(training)
    counts = tally(whole)
    alone = any(not _differences(want, step, t) for want in wants for step, t in holding)
    fits = any(not _differences(want, whole, counts) or _pieces(want, counts) for want in wants)
    return (whole, counts) if fits and not alone and whole.known else None


def _pieces(want: _Want, t: Tally) -> bool:
    """Whether no parameter group has more than was declared: graphs around a break, not one step compiled twice."""
    return all(n <= (want.groups.get(key, 0) or 0) for key, n in t.groups.items() if key[1] != "regather")


def _never_again(want: _Want, step: Step, t: Tally) -> list[str]:
    """The units of which backward gathers nothing again, where how much it should is not known."""
    texts = []
    for cell in (cell for cell, count in want.count.items() if count is None and cell[1] in step.phases):
        open_ones = [key[2] for key, count in want.groups.items() if key[:2] == cell and count is None]
        none = [name or "(root)" for name in open_ones if name is not None and not t.groups[cell[0], cell[1], name]]
        if none and step.kind == "training":
            more = f" and {len(none) - 8} more" if len(none) > 8 else ""
            texts.append(
                f"step {step.name}, {cell[0]}, {cell[1]}: {', '.join(none[:8])}{more}: resharded after forward, and "
                "nothing gathered again: backward needs none of these parameters, or it kept them"
            )
    return texts


def _beyond(want: _Want, step: Step, t: Tally) -> list[str]:
    """One text for each (role, phase) of which the step holds all that was declared, and more."""
    return [
        f"step {step.name} ({step.kind}), {role}, {phase}: {t.captured[role, phase]} captured, "
        f"{t.explicit[role, phase]} of them explicit, where one pass through every module calls for {expected}: a "
        "module that runs several times, or another collective that looks the same"
        for role, phase in sorted({*want.count, *t.captured})
        if phase in step.phases
        and (expected := want.count.get((role, phase), 0)) is not None
        and t.explicit[role, phase] >= expected
        and (expected > 0 or not t.explicit[role, phase])
        and t.captured[role, phase] > expected
    ]


def _differences(want: _Want, step: Step, t: Tally, *, short: bool = False) -> list[str]:
    """One text for each (role, phase) that the step tells about and that is not as declared, all explicit.

    With ``short`` only where fewer are explicit than declared: more is a module that runs several times.
    """
    texts = []
    for cell in sorted({*want.count, *t.captured}):
        role, phase = cell
        expected = want.count.get(cell, 0)
        if phase not in step.phases or expected is None:
            continue
        captured, explicit = t.captured[cell], t.explicit[cell]
        if captured == expected == explicit:
            continue
        if short and explicit >= expected and (expected > 0 or not explicit):
            continue
        found = [f"{captured} captured"]
        for n, what in (
            (t.inferred[cell], "inferred only"),
            (t.malformed[cell], "malformed"),
            (t.unlabelled[cell], "without a payload"),
            (sum(t.dropped.get(cell, {}).values()), "dropped"),
        ):
            if n:
                found.append(f"{n} {what}")
        where = _by_group(want, t, cell)
        texts.append(
            f"{codes.EXPECTED_MISMATCH.id} {codes.EXPECTED_MISMATCH.slug}: step {step.name} ({step.kind}), "
            f"{role}, {phase}: expected {expected} explicit, found {', '.join(found)}"
            + (f"; {where}" if where else "")
            + "; a parameter that this forward never reads, or that was frozen after install, counts as well"
        )
    return texts


def _by_group(want: _Want, t: Tally, cell: Cell, limit: int = 8) -> str:
    keys = sorted((k for k in {*want.groups, *t.groups} if k[:2] == cell), key=str)
    off = [
        f"{k[2] or '(root)'}: {want.groups.get(k, 0)} expected, {t.groups[k]} captured"
        for k in keys
        if k[2] is not None and want.groups.get(k, 0) is not None and want.groups.get(k, 0) != t.groups[k]
    ]
    more = f" and {len(off) - limit} more" if len(off) > limit else ""
    return f"by parameter group: {'; '.join(off[:limit])}{more}" if off else ""


def _rows(shown: Sequence[tuple[_Want | None, Step, Tally]]) -> tuple[CoverageRow, ...]:
    rows: dict[Cell, CoverageRow] = {}
    for want, step, t in shown:
        cells = {*t.captured, *t.malformed, *t.unlabelled, *t.dropped, *(want.count if want else ())}
        for cell in cells:
            row = _row(cell, want, step, t)
            rows[cell] = row if cell not in rows else _added(rows[cell], row)
    return tuple(rows[cell] for cell in sorted(rows, key=lambda c: (c[0], PHASES.index(c[1]))))


def _row(cell: Cell, want: _Want | None, step: Step, t: Tally) -> CoverageRow:
    inference = step.kind == "inference" and cell[1] != "forward"
    expected = None if want is None or inference else want.count.get(cell, 0)
    known = cell[1] in step.phases
    dropped = dict(t.dropped.get(cell, {}))
    short = None if expected is None or not known else max(0, expected - t.captured[cell])
    return CoverageRow(
        role=cell[0],
        phase=cell[1],
        expected=expected,
        captured=t.captured[cell] if known else None,
        explicit=t.explicit[cell],
        inferred=t.inferred[cell],
        malformed=t.malformed[cell],
        unlabelled=t.unlabelled[cell],
        dropped=dropped,
        not_captured=None if short is None else max(0, short - t.absent[cell]),
        buckets_expected=None if want is None or inference else want.buckets.get(cell, 0),
        after=t.after[cell] if known and all(g.after is not None for g in step.parts) else None,
    )


def _added(a: CoverageRow, b: CoverageRow) -> CoverageRow:
    return CoverageRow(
        role=a.role,
        phase=a.phase,
        expected=_plus(a.expected, b.expected),
        captured=_plus(a.captured, b.captured),
        explicit=a.explicit + b.explicit,
        inferred=a.inferred + b.inferred,
        malformed=a.malformed + b.malformed,
        unlabelled=a.unlabelled + b.unlabelled,
        dropped=Counter(a.dropped) + Counter(b.dropped),
        not_captured=_plus(a.not_captured, b.not_captured),
        buckets_expected=_plus(a.buckets_expected, b.buckets_expected),
        after=_plus(a.after, b.after),
    )
