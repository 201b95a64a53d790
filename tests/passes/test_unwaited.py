"""A collective's result that nobody waited for gets no gradient in torch 2.12 to 2.15: that is not silent here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import collective_identity as ci
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity.compat import torch_version

pytestmark = pytest.mark.usefixtures("one_rank")


class Gathered(torch.autograd.Function):
    """As DTensor.redistribute does it."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_gradient_that_is_lost_is_told(trained: bool, copied: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    x, weight = torch.ones(2, requires_grad=trained), torch.ones(2, requires_grad=True)
    given = Gathered.apply(x)
    with ci.enable(agreement_timeout=0) as handle:
        compiled = torch.compile(
            lambda x, w: (x * w).sum(), backend="collective_identity", options={"inner": "aot_eager"}
        )
        compiled(given.clone() if copied else given, weight).backward()
        told = [failure for failure in handle.report().failures if failure.startswith("CI045 unwaited_input: ")]
    lost = trained and not copied and torch_version() >= (2, 12)
    assert bool(told) is lost and ("CI045 unwaited_input" in caplog.text) is lost
    if lost:
        assert told[0].endswith("; inputs l_x_ [2]") and handle.report().ok is False
    else:
        assert x.grad is None or x.grad.tolist() == [1.0, 1.0]
