"""The second device of the policy tests: built with the system's compiler, kept by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

NAME = "polydev"
SOURCE = Path(__file__).with_name("device.cpp")
ROOT = Path(__file__).resolve().parents[2]


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)


def library() -> Path:
    """Build the device's library, or find the one built from the same source, torch and compiler."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the second test device needs a C++ compiler (g++ or clang++), found none on PATH")
    home = Path(torch.__file__).parent
    command = [
        cxx, "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include",
        f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib",
    ]  # fmt: skip
    content = "\n".join((SOURCE.read_text(), torch.__version__, *command))
    folder = ROOT / ".dev" / "policy_device"
    built = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"building {SOURCE.name} failed:\n{done.stderr[-3000:]}")
        unfinished.replace(built)
    return built
