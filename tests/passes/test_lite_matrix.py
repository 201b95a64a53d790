"""Every program of the matrix under the strict preset: equal to ``aot_eager`` bit for bit, or its limit is pinned.

The default run has those of ``QUICK`` with the backend of this package; ``-m long`` has all, also without the backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import collective_identity as ci
from tests.lite_matrix import WAYS, differences, results
from tests.lite_matrix_operators import PROGRAMS

QUICK = frozenset(
    "convolution_batch_norm marked_random custom_into_intermediate custom_into_input mutate_input "
    "mutate_buffer dynamic_rows checkpoint_dropout cond_gradient view_outputs complex all_gather_reduce_scatter "
    "size_from_data equal_operators nested_region_gradient optimizer_step map_gradient scan_gradient".split()
)
COMPILED = frozenset({"marked_region", "marked_flex_attention"})
"""Marked for compilation: equal within the last bits."""

FAILS = {
    "flex_attention": r"LiteUnsupported.*'flex_attention'.*compile_with_inductor",
    "moe_bfloat16": r"expected size .* stride",
}
"""By program, the error instead; each is in docs/lite-mode.md."""


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ci.enable(agreement_timeout=0):
        yield
    dist.destroy_process_group()


def check(name: str, way: str) -> None:
    make, how = PROGRAMS[name], {**WAYS[way], "traced_once": way == "plain"}
    if name in FAILS:
        with pytest.raises(Exception, match=FAILS[name]):
            results(make, **how)
        return
    expected, found = results(make, backend="aot_eager"), results(make, **how)
    if name in COMPILED:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert differences(expected, found) == []


@pytest.mark.parametrize("name", sorted(QUICK | FAILS.keys()))
def test_as_aot_eager(name: str) -> None:
    check(name, "backend")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PROGRAMS))
@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_program_as_aot_eager(name: str, way: str) -> None:
    check(name, way)


def test_the_matrix_is_whole() -> None:
    assert len(PROGRAMS) >= 52
    assert QUICK | COMPILED | FAILS.keys() <= PROGRAMS.keys()
    expected = results(PROGRAMS["mutate_buffer"], backend="aot_eager")
    planted = {**expected, "buffers": [expected["buffers"][0], expected["buffers"][1] + 1e-6]}
    assert differences(expected, planted), "a difference in a buffer is seen"
