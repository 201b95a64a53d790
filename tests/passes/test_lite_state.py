"""Is the graph compiled in Inductor's lite mode? Asked under the configuration of the moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from inductor_passes import LiteState, lite_state
from tests.graphs import Builder


def graph(**meta: Any) -> torch.fx.GraphModule:
    b = Builder()
    b.output(b.placeholder("x"))
    gm = b.module()
    gm.meta.update(meta)
    return gm


LITE = torch._inductor.list_mode_options("lite")


def test_off() -> None:
    assert lite_state(graph()) is LiteState.OFF
    assert lite_state(graph(nested_region_config=object())) is LiteState.OFF


def test_full() -> None:
    gm = graph()
    with inductor_config.patch(LITE):
        assert lite_state(gm) is LiteState.FULL
    assert lite_state(gm) is LiteState.OFF, "asked anew each time"


def test_all_of_lite_but_the_switch_itself_is_off() -> None:
    with inductor_config.patch({**LITE, "fallback_by_default": False}):
        assert lite_state(graph()) is LiteState.OFF


def test_the_switch_alone_is_a_part() -> None:
    with inductor_config.patch(fallback_by_default=True):
        assert lite_state(graph()) is LiteState.PARTIAL


@pytest.mark.parametrize("name", sorted(set(LITE) - {"fallback_by_default"}))
def test_any_switch_turned_back_makes_it_a_part(name: str) -> None:
    value = LITE[name]
    other = (not value) if isinstance(value, bool) else "something else"
    with inductor_config.patch({**LITE, name: other}):
        assert lite_state(graph()) is LiteState.PARTIAL


def test_a_nested_region() -> None:
    with inductor_config.patch(LITE):
        assert lite_state(graph(nested_region_config=object())) is LiteState.REGION
        assert lite_state(graph(nested_region_config=None)) is LiteState.FULL


@pytest.mark.parametrize(
    ("around", "own", "state"),
    [(False, True, LiteState.REGION), (True, False, LiteState.OFF), (False, False, LiteState.OFF)],
)
def test_a_regions_own_options_count_before_what_is_around_it(around: bool, own: bool, state: LiteState) -> None:
    config = SimpleNamespace(inductor_config_patches={"fallback_by_default": own})
    with inductor_config.patch(LITE if around else {}):
        assert lite_state(graph(nested_region_config=config)) is state
