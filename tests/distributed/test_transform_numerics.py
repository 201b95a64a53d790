"""Every pass on real ranks (gloo): 200 random graphs give the values they gave before, 40 of them in every run.

Gathers and, on two ranks, bucketed sums are equal bit for bit; sums that are reassociated are equal for integers and
within (addends) * eps * sum of magnitudes otherwise. ``transform_runs`` runs as many graphs as wanted by hand.
"""

from __future__ import annotations

import pytest

from tests.distributed.launch import launch
from tests.distributed.transform_runs import PASSES, check


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "seeds"), [
    (2, range(40)),
    pytest.param(2, range(40, 140), marks=pytest.mark.long),
    pytest.param(4, range(140, 200), marks=pytest.mark.long),
])
def test_values_stay_what_they_were(ranks: int, seeds: range) -> None:
    results = launch(check, ranks, list(seeds), timeout=300)
    assert all(result == results[0] for result in results), "every rank made the same decisions"
    assert set(results[0]) == set(PASSES) and min(results[0].values()) > 20, results[0]
