"""Which synthetic identities does a graph get? Four sets, each of which shows another kind of fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import fx

from .. import store
from ..identity import VERSION, Identity, Source
from ..roles import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from ..scan import scan_graphs
from ..transports import Launch, Transport

STAMPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "same": "every collective of a transport has one role: a merge may keep it",
        "different": "every collective has a role of its own: no merge may keep one",
        "missing": "every second collective has no identity: no merge of one with and one without may keep it",
        "inferred": "every second identity is inferred: no merge may become explicit",
    }
)
"""The sets of synthetic identities by name, and what each shows."""

_FSDP: Final = MappingProxyType(
    {
        Transport.ALL_GATHER: PARAM_UNSHARD,
        Transport.REDUCE_SCATTER: GRAD_REDUCE_SHARD,
        Transport.ALL_REDUCE: GRAD_REPLICATE_REDUCE,
    }
)


@dataclass(frozen=True, slots=True)
class Origin:
    """A collective as it was before the pass.

    Attributes:
        number: its place in the graph.
        name: of its start node.
        launch: what it launched.
        identity: what was stamped, None for nothing.
    """

    number: int
    name: str
    launch: Launch
    identity: Identity | None


def stamp_all(gm: fx.GraphModule, stamp: str) -> dict[fx.Node, Origin]:
    """Remove every identity of the graph and its sub-graphs and stamp the set ``stamp``.

    Each carries the parameter ``"c<number>"``, so that it is known wherever it turns up.

    Raises:
        ValueError: no such set.
    """
    if stamp not in STAMPS:
        raise ValueError(f"stamps: expected some of {', '.join(STAMPS)}, found {stamp!r}")
    origins: dict[fx.Node, Origin] = {}
    for scan in scan_graphs(gm):
        for node in scan.module.graph.nodes:
            store.clear(node)
            store.forget_members(node)
        for node, launch in scan.launches.items():
            number = len(origins)
            identity = _identity(stamp, number, launch)
            if identity is not None:
                store.stamp(node, identity)
            origins[node] = Origin(number, node.name, launch, identity)
    return origins


def _identity(stamp: str, number: int, launch: Launch) -> Identity | None:
    if stamp == "missing" and number % 2:
        return None
    role = f"debugify.c{number}" if stamp == "different" else _FSDP.get(launch.transport, "debugify.other")
    source = Source.INFERRED if stamp == "inferred" and number % 2 else Source.EXPLICIT
    return Identity(VERSION, role, source, "debugify", None, "debugify", (f"c{number}",))
