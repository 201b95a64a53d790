"""Every pass on real ranks (gloo): 200 random graphs give the values they gave before.

Gathers and, on two ranks, bucketed sums are equal bit for bit; sums that are reassociated are equal for integers and
within (addends) * eps * sum of magnitudes otherwise. On four ranks the library's order of addition may depend on the
buffer's layout, so that bucketed sums are compared on integers. ``transform_runs`` runs as many graphs as wanted.
"""

from __future__ import annotations

import pytest

from tests.distributed.launch import launch
from tests.distributed.transform_runs import PASSES, on_pairs_and_all


@pytest.mark.distributed
def test_values_stay_what_they_were() -> None:
    results = launch(on_pairs_and_all, 4, range(100), range(100, 200), timeout=300)
    for saved in (on_all for _, on_all in results):
        assert saved == results[0][1], "every rank made the same decisions"
    for in_pairs, on_all in results:
        for saved in (in_pairs, on_all):
            assert set(saved) == set(PASSES) and min(n for name, n in saved.items() if name != "overlap") > 20, saved
            assert saved["overlap"] == 0
