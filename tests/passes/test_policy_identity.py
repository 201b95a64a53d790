"""Whatever changes what a function computes changes its identity, or is refused by name; nothing is compiled here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.device_policy import NoIdentity, OperatorPolicy, PolicyError, content_identity

FOLLOWED: dict[str, dict[str, str]] = {
    "cache": {"main": "@functools.cache\ndef factor(k): return k * @@\ndef f(x): return x * factor(1)"},
    "cached static method": {
        "main": "class C:\n @staticmethod\n @functools.lru_cache(8)\n def k(n): return @@\ndef f(x): return x * C.k(1)"
    },
    "size of a cache": {"main": "@functools.lru_cache(@@)\ndef g(k): return k\ndef f(x): return g(x)"},
    "attribute of a cached function": {"main": "@functools.cache\ndef g(): return g.s\ng.s = @@\ndef f(x): return g()"},
    "partial": {"main": "def h(x, k): return x * k\np = functools.partial(h, k=@@)\ndef f(x): return p(x)"},
    "single dispatch": {"main": "@functools.singledispatch\ndef h(x): return x * @@\ndef f(x): return h(x)"},
    "registered dispatch": {
        "main": "@functools.singledispatch\ndef h(x): return x\n@h.register(int)\ndef _(x): return @@\n"
        "def f(x): return h(x)"
    },
    "wraps a function of torch": {
        "main": "from torch._inductor import lowering\nS = @@\n@functools.wraps(lowering.clone)\ndef f(x): return x * S"
    },
    "wraps a function of Python": {
        "main": "import statistics\nS = @@\n@functools.wraps(statistics.mean)\ndef g(x): return x * S\n"
        "def f(x): return g(x)"
    },
    "context manager": {
        "main": "import contextlib\n@contextlib.contextmanager\ndef c(): yield @@\n"
        "def f(x):\n with c() as k: return x * k"
    },
    "decorator of torch": {
        "main": "from torch._prims_common.wrappers import out_wrapper\n@out_wrapper()\ndef f(x): return x * @@"
    },
    "enum member": {"main": "class E(enum.IntEnum): X = @@\nS = E.X\ndef f(x): return x * S"},
    "enum member as a default": {"main": "class E(enum.Enum): X = @@\ndef f(x, e=E.X): return x * e.value"},
    "enum method": {"main": "class E(enum.Enum):\n X = 1\n def k(self): return @@\nS = E.X\ndef f(x): return S.k()"},
    "enum base": {
        "main": "class B(enum.Enum):\n def k(self): return @@\nclass E(B): X = 1\ndef f(x): return E.X.k()"
    },
    "enum state": {
        "main": "class E(enum.Enum):\n X = 1\n def __init__(self, v): self.k = @@\ndef f(x): return E.X.k"
    },
    "flags": {"main": "class E(enum.Flag): A = 1; B = @@\nS = E.A | E.B\ndef f(x): return x * S.value"},
    "module in a closure": {
        "other": "S = @@", "main": "import other\ndef make(m):\n def g(x): return x * m.S\n return g\nf = make(other)"
    },
    "module as a default": {"other": "S = @@", "main": "import other\ndef f(x, m=other): return x * m.S"},
    "module in a tuple": {"other": "S = @@", "main": "import other\nT = (other,)\ndef f(x): return x * T[0].S"},
    "module in a class": {"other": "S = @@", "main": "import other\nclass C: m = other\ndef f(x): return C.m.S"},
    "module handed on": {"other": "S = @@", "main": "import other\ndef h(m): return m.S\ndef f(x): return h(other)"},
    "another name of a module seen before": {
        "package/__init__": "from . import inner", "package/inner": "A = @@\nB = 1",
        "main": "import package\ndef g(x): return package.inner.B\ndef f(x): return g(x) * package.inner.A",
    },
    "__getattr__ of a module": {
        "other": "def __getattr__(n): return @@", "main": "import other\ndef f(x): return other.S"
    },
    "module named as one of Python's": {
        "profile": "S = @@\ndef h(x): return x * S", "main": "import profile\ndef f(x): return profile.h(x)"
    },
    "getattr": {"other": "S = @@", "main": "import other\ndef f(x): return getattr(other, 'S', None)"},
    "format by a global": {
        "other": "S = @@", "main": "import other\nT = '{0.S}'\ndef f(x): return T.format(other)"
    },
    "class pattern": {
        "other": "S = @@", "main": "import other\ndef f(x):\n match other:\n  case object(S=s): return x * s"
    },
    "attribute of a partial": {
        "main": "def h(x): return x\np = functools.partial(h)\np.S = @@\ndef f(x): return p(x) * p.S"
    },
    "attribute of a single dispatch": {
        "main": "@functools.singledispatch\ndef h(x): return x\nh.S = @@\ndef f(x): return h(x) * h.S"
    },
    "format": {"other": "S = @@", "main": "import other\ndef f(x): return '{0.S}'.format(other)"},
    "put into torch": {"main": "import torch\ntorch.made_up = @@\ndef f(x): return x * torch.made_up"},
    "function put into torch": {
        "main": "import torch\ndef g(x): return x * @@\ntorch.made_up = g\ndef f(x): return torch.made_up(x)"
    },
    "module put into torch": {
        "other": "S = @@", "main": "import torch, other\ntorch.made_up = other\ndef f(x): return torch.made_up.S"
    },
    "function attribute": {"main": "def h(x): return x * h.S\nh.S = @@\ndef f(x): return h(x)"},
    "own attribute": {"main": "def f(x): return x * f.S\nf.S = @@"},
    "metaclass": {"main": "class M(type): S = @@\nclass C(metaclass=M): pass\ndef f(x): return x * C.S"},
    "property": {"main": "class C:\n @property\n def s(self): return @@\ndef f(x): return x * C().s"},
    "slots": {"main": "class C:\n __slots__ = ('a',)\n def s(self): return @@\ndef f(x): return x * C().s()"},
    "list in itself": {"main": "S = [@@]\nS.append(S)\ndef f(x): return x * S[0]"},
    "dict in itself": {"main": "S = {'k': @@}\nS['s'] = S\ndef f(x): return x * S['k']"},
    "zero": {"main": "S = (0.0, -0.0)[@@ - 2]\ndef f(x): return x * S"},
}  # fmt: skip
"""Modules that change what ``main.f`` computes with the number in them."""

REFUSED: dict[str, tuple[str, str]] = {
    "globals": ("S = 2\ndef f(x): return globals()['S']", "which is globals"),
    "vars": ("import other\ndef f(x): return vars(other)['S']", "which is vars"),
    "__dict__": ("import other\ndef f(x): return other.__dict__['S']", "uses __dict__ in f"),
    "__globals__": ("S = 2\ndef f(x): return f.__globals__['S']", "uses __globals__ in f"),
    "__doc__": ("class C: '2'\ndef f(x): return int(C.__doc__)", "uses __doc__ in f"),
    "eval": ("S = 2\ndef f(x): return eval('S')", "which is eval"),
    "sys.modules": ("import sys\ndef f(x): return sys.modules['other'].S", "which is sys.modules"),
    "sys.modules by name": ("from sys import modules as m\ndef f(x): return m['other'].S", "which is sys.modules"),
    "sys imported inside": ("def f(x):\n import sys\n return sys.modules['other'].S", "which is sys.modules"),
    "import_module": ("import importlib\ndef f(x): return importlib.import_module('other').S", "which is importlib"),
    "import_module by name": ("from importlib import import_module as i\ndef f(x): return i('other')", "is importlib"),
    "attrgetter": ("import operator, other\ndef f(x): return operator.attrgetter('S')(other)", "which is attrgetter"),
    "attrgetter made before": ("import operator\ng = operator.attrgetter('S')\ndef f(x): return g(x)", "attrgetter"),
    "computed": ("import other\ndef f(x, k): return getattr(other, 'S' + k)", "uses getattr in f"),
    "computed by a method": ("import other\ndef f(x): return getattr(other, 's'.upper())", "uses getattr in f"),
    "computed, of a call": ("def g(k): return k\ndef f(x, k): return getattr(g('S'), k)", "uses getattr in f"),
    "another name": ("import other\ng = getattr\ndef f(x): return g(other, 'S')", "which is getattr"),
    "partial of getattr": (
        "import other\ng = functools.partial(getattr, other, 'S')\ndef f(x): return g()", "which is getattr"
    ),
    "environment": ("import os\ndef f(x): return int(os.environ['S'])", "which is os.environ"),
    "file": ("def f(x): return open('S').read()", "which is open"),
    "another under the cache": (
        "import statistics\n@functools.wraps(statistics.mean)\n@functools.cache\ndef g(x): return x\n"
        "def f(x): return g(x)", "no stable identity",
    ),
    "too deep": ("S = ()\nfor _ in range(3000): S = (S,)\ndef f(x): return S", "nested too deeply"),
    "operator with Python code": (
        "import torch\nL = torch.library.Library('made_up_by_tests', 'FRAGMENT')\nL.define('s(Tensor x) -> Tensor')\n"
        "def s(x): return x * 2\nL.impl('s', s, 'CompositeImplicitAutograd')\n"
        "def f(x): return torch.ops.made_up_by_tests.s(x)", "whose own Python code is traced",
    ),
}  # fmt: skip

MODULES = ("main", "other", "package", "package.inner", "profile")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes modules and gives ``main.f``, as a process of its own would import it."""
    import torch

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(torch, "made_up", None, raising=False)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)  # so that it is put back

    def made(sources: dict[str, str]) -> Any:
        for name in MODULES:
            sys.modules.pop(name, None)
        for name, text in sources.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module("main").f

    return made


def test_what_changes_the_result_changes_the_identity(write: Any) -> None:
    for case, sources in FOLLOWED.items():
        found = []
        for number in ("2", "3", "2"):
            texts = {name: text.replace("@@", number) for name, text in sources.items()}
            found.append(content_identity(write({**texts, "main": "import enum, functools\n" + texts["main"]})))
        assert found[0] == found[2] != found[1], case


def test_kinds_of_descriptors_differ(write: Any) -> None:
    form = "class C:\n @{}\n def h(*a): return len(a)\ndef f(x): return C.h(1)"
    one, other = (content_identity(write({"main": form.format(kind)})) for kind in ("staticmethod", "classmethod"))
    assert one != other


def test_what_cannot_be_followed_is_refused(write: Any) -> None:
    for case, (text, said) in REFUSED.items():
        function = write({"other": "S = 2", "main": "import functools\n" + text})
        with pytest.raises(NoIdentity) as caught:
            content_identity(function)
        assert said in str(caught.value), case
        with pytest.raises(PolicyError, match="f "):
            OperatorPolicy("p", "1", "cuda", lowerings={"aten::relu": function})


def test_what_lowerings_are_made_of_has_an_identity(write: Any) -> None:
    text = """
import itertools, math, operator, sympy, torch
import torch.nn.functional as F
from math import sqrt
from torch import sin
from torch._inductor import config, ir, lowering
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import clone, expand, make_pointwise, make_reduction, to_dtype
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv
@functools.cache
def factor(): return sqrt(2)
def f(x):
    from torch._inductor.lowering import relu
    def inner(index): return ops.add(x.make_loader()(index), sympy.Integer(factor()))
    if config.max_autotune and hasattr(x, "data") and math.prod(x.get_size()) > 3:
        return expand(to_dtype(relu(clone(x)), torch.float32), FloorDiv(4, 2))
    if getattr(x.data, "dtype", None) is torch.float32:
        return F.gelu(sin(x)) + torch.ops.aten.sin(x)
    return Pointwise.create(device=x.get_device(), dtype=x.dtype, inner_fn=inner, ranges=list(x.get_size()))
"""
    made = {"main": "import functools" + text}
    assert content_identity(write(made)) == content_identity(write(made))
