"""``python -m benchmarks NAME [--json] ...``: one entry for every measurement."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "train": "step time, tokens/s, peak memory and losses of each way to run FSDP2 (start with torchrun)",
    "comm": "latency and bandwidth of collectives, predicted and measured, and bucket sizes (start with torchrun)",
    "classify": "what each collective is: ours against torch's own, growth with the graph, networkx's share",
    "bucketing": "merging gathers: ours against torch's own, memory, growth with the graph",
    "passes": "growth with the graph: buckets, dedup, fusion, overlap, reshard, guard, reconciling, ledger, bytes",
    "kernels": "packing and unpacking buckets: our kernels against torch's operators and the copy bandwidth",
    "dedup": "scattering a sum once: ours against torch's own, growth with the graph",
    "fusion": "tensor-parallel products fused and unfused on GPUs (start with torchrun)",
    "lite": "the models in lite mode: equal to aot_eager bit for bit, and how fast (--device cuda: flex attention too)",
    "selective_decompose": "decomposing marked regions during the one trace against torch's second trace",
    "policy": "operator policies: their cost, and with --prove the isolation and cache proof",
    "diagnostics": "what the ledger and the report cost: bytes a collective, seconds, share of a compile",
    "compile_time": "compile seconds of equal blocks: captured cold and warm against per-block, our own share",
    "identity": "what identities cost: compile time and metadata memory per collective",
}


def main() -> int:
    """Run the named benchmark with the remaining arguments."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        lines = "\n".join(f"  {name:20s} {text}" for name, text in NAMES.items())
        print(f"usage: python -m benchmarks NAME [--json] [--help]\n{lines}", file=sys.stderr)
        return 0 if "--help" in sys.argv else 2
    name = sys.argv.pop(1)
    return int(importlib.import_module(f"benchmarks.{name}").main())


if __name__ == "__main__":
    raise SystemExit(main())
