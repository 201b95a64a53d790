"""What does one process of a launch do? It reads its job, meets the others, runs the function, leaves the value.

Either a fresh Python that runs this file, or a fork of a server that has imported torch once (`forked`): the import
costs 2 to 6 s of processor in each process otherwise, more than most tests do.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]

def _load(job: Mapping[str, Any]) -> ModuleType:
    """Import the module of the function under the name it has in the parent, whatever way pytest imported
    it."""
    name: str = job["module"] if job["module"] != "__main__" else "__launched__"
    try:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) == job["file"]:
            return module
    except ImportError:
        pass
    spec = importlib.util.spec_from_file_location(name, job["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _start_process_group(work: Path, rank: int, job: Mapping[str, Any]) -> None:
    import torch.distributed as dist

    ranks: int = job["ranks"]
    store: dist.Store
    if job["store"] == "file":
        store = dist.FileStore(str(work / "store"), ranks)
    else:
        port = work / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
            written = work / "port.new"
            written.write_text(str(store.port))
            written.rename(port)
        else:
            while not port.exists():
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), ranks, is_master=False)
    dist.init_process_group(job["backend"], store=store, rank=rank, world_size=ranks)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(99)


def _child(work: Path, rank: int) -> int:
    job = pickle.loads((work / "job").read_bytes())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    faulthandler.dump_traceback_later(job["dump_after"], exit=False)
    sys.path[:] = [*job["path"], str(REPOSITORY)]
    function: Any = _load(job)
    for part in job["function"].split("."):
        function = getattr(function, part)
    args = pickle.loads(job["args"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    if job["backend"] is not None:
        _start_process_group(work, rank, job)
    value = function(rank, job["ranks"], *args)
    written = work / f"value{rank}.new"
    written.write_bytes(pickle.dumps(value))
    written.rename(work / f"value{rank}")
    if job["backend"] is not None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return 0


def run(work: Path, rank: int) -> NoReturn:
    """All that the process is for; whatever happens it ends here, and its log says why."""
    try:
        code = _child(work, rank)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def forked(work: Path, rank: int, env: Mapping[str, str]) -> NoReturn:
    """The same in a fork: its own session, environment and log, as a fresh process would have."""
    os.setsid()
    log = os.open(work / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, onto in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, onto)
    os.environ.clear()
    os.environ.update(env)
    run(work, rank)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
