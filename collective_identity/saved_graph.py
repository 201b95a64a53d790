"""How is one graph kept in a file, with its identities? A header that is read without running anything, then a pickle.

A pickled GraphModule loses ``meta["custom"]``; torch's GraphPickler keeps it. **A pickle can run code when it is
loaded**: `read` loads only files that begin with our header and are whole, which shows where a file comes from by
accident, not by intent. Load only what you or your job wrote. `header_of` loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from . import compat

MAGIC: Final = b"collective-identity graph\n"
FORMAT: Final = 1
FOLDER: Final = "graphs"
SUFFIX: Final = ".graph"

_LONGEST_HEADER: Final = 65536  # bytes
_KEPT: Final = (
    "partitioner_tag", "autograd_backward", "recompute", "ac_graph_id", "seq_nr", "stack_trace", "original_aten",
)


class SavedGraphError(ValueError):
    """A graph cannot be saved, or a file is none of ours, damaged or of another version; one sentence says which."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        format: of the file, `FORMAT`.
        torch: the version that wrote it; only another build of the same one reads it.
        rank: of the process that wrote it.
        phase: ``"forward"``, ``"backward"`` or ``"inference"``.
        name: of the compile, the same for its forward and backward.
        number: of the graph in its section of the run file.
        nbytes: length of the pickle.
        sha256: of the pickle, hex.
    """

    format: int
    torch: str
    rank: int
    phase: str
    name: str
    number: int
    nbytes: int
    sha256: str


def write(folder: Path, gm: fx.GraphModule, *, rank: int, phase: str, name: str, number: int) -> Path:
    """Save a graph as ``folder/rank<R>-graph<N>-<phase>.graph``; whole or not at all.

    Kept: nodes, payloads and other plain values under ``custom``, shapes, dtypes, strides and devices, sub-graphs.
    Not kept: the values of tensors, which tensors share memory, and other metadata of nodes.

    Raises:
        SavedGraphError: the graph holds something that cannot be pickled.
        OSError: the folder cannot be written.
    """
    try:
        data = compat.dump_graph(_portable(gm))
    except Exception as error:  # a pickle fails with whatever the objects in it raise
        raise SavedGraphError(
            f"expected a graph that can be pickled, found one that cannot ({type(error).__name__}: {error})"
        ) from error
    header = Header(
        FORMAT, str(torch.__version__), rank, phase, name, number, len(data), hashlib.sha256(data).hexdigest()
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}-graph{number}-{phase}{SUFFIX}"
    part = path.with_suffix(".part")
    part.write_bytes(MAGIC + json.dumps(asdict(header)).encode() + b"\n" + data)
    os.replace(part, path)
    return path


def header_of(path: Path) -> Header:
    """The header of a file; nothing is unpickled.

    Raises:
        SavedGraphError: not found, or none of ours.
    """
    return _open(path, whole=False)[0]


def read(path: Path) -> tuple[Header, fx.GraphModule]:
    """The header and the graph, its tensors fake.

    Raises:
        SavedGraphError: not found, none of ours, cut off or damaged, or written by another torch.
    """
    header, data = _open(path, whole=True)
    if _release(header.torch) != _release(torch.__version__):
        raise SavedGraphError(
            f"{path}: written by torch {header.torch}, found torch {torch.__version__}; read it with the version that "
            "wrote it"
        )
    if len(data) != header.nbytes or hashlib.sha256(data).hexdigest() != header.sha256:
        raise SavedGraphError(
            f"{path}: damaged or cut off: expected {header.nbytes} bytes with the checksum of its header, found "
            f"{len(data)}; dump it again"
        )
    try:
        gm = compat.load_graph(data)
    except Exception as error:  # whatever unpickling an unfit file raises
        raise SavedGraphError(f"{path}: cannot be unpickled ({type(error).__name__}: {error})") from error
    if not isinstance(gm, fx.GraphModule):
        raise SavedGraphError(f"{path}: expected a graph, found {type(gm).__name__}")
    return header, gm


def _release(version: str) -> str:
    """Without the build: a graph of ``2.13.0+cu130`` is read with ``2.13.0+cpu``."""
    return str(version).split("+")[0]


def _open(path: Path, *, whole: bool) -> tuple[Header, bytes]:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise SavedGraphError(f"{path}: no saved graph: expected a file that `collective-identity dump` lists")
            line = file.readline(_LONGEST_HEADER)
            return _header(path, line), file.read() if whole else b""
    except OSError as error:
        raise SavedGraphError(f"{path}: cannot be read: {error.strerror or error}") from error


def _header(path: Path, line: bytes) -> Header:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not line.endswith(b"\n"):
        raise SavedGraphError(f"{path}: damaged or cut off in its header; dump it again")
    if given.get("format") != FORMAT:
        raise SavedGraphError(f"{path}: expected format {FORMAT}, found {given.get('format')!r}; dump it again")
    types = {"int": int, "str": str}
    wrong = [f.name for f in fields(Header) if type(given.get(f.name)) is not types[str(f.type)]]
    if wrong:
        raise SavedGraphError(f"{path}: damaged header: {', '.join(wrong)} missing or of another type; dump it again")
    return Header(**{f.name: given[f.name] for f in fields(Header)})


def _portable(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that holds no tensor values and only metadata that can be pickled; ``gm`` is not changed."""
    fake = compat.fake_mode_of(node.meta.get("val") for node in gm.graph.nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    held: dict[str, Any] = {}
    for node in gm.graph.nodes:
        env[node] = copied = graph.node_copy(node, env.__getitem__)
        copied.meta = _meta(node.meta, fake)
        if node.op == "get_attr":
            value: Any = gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            held[str(node.target)] = _portable(value) if isinstance(value, fx.GraphModule) else _plain(value, fake)
    return fx.GraphModule(held, graph)


def _meta(meta: Mapping[str, Any], fake: Any) -> dict[str, Any]:
    kept = {key: meta[key] for key in _KEPT if key in meta}
    if "val" in meta:
        kept["val"] = torch.utils._pytree.tree_map(lambda value: _plain(value, fake), meta["val"])
    custom = meta.get("custom")
    if isinstance(custom, Mapping):
        kept["custom"] = {key: value for key, value in custom.items() if isinstance(key, str) and _is_data(value)}
    return kept


def _plain(value: Any, fake: Any) -> Any:
    """A tensor of the same look that is no view: GraphPickler cannot keep a view of a view."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _is_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_data(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return value is None or type(value) in (bool, int, float, str)
