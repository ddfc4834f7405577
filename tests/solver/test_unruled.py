"""Ops without a rule are planned, said, and costed on the data axis too."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.ir.plan import Plan, TrainingPlan
from autopar.solver import Cluster, solve


class Model(nn.Module):
    """A linear layer whose result goes through an op that has no rule, or one that has."""

    def __init__(self, *, ruled: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.function = torch.exp if ruled else torch.special.i0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x)).square().mean()


def _plan(*, ruled: bool, dp: int) -> Plan:
    model = capture(Model(ruled=ruled), {"x": torch.zeros(2, 512, 64)})
    training = TrainingPlan(
        precision="fp32",
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        max_grad_norm=None,
        seed=0,
    )
    pin = {"dp_shard": 1, "dp_replicate": dp, "tp": 1, "pp": 1, "micro_batch_size": 1}
    return solve(model, Cluster("a100-80gb"), global_batch_size=8, training=training, pin={**pin})


def test_a_plan_names_ops_without_a_rule_and_their_cost():
    found = _plan(ruled=False, dp=8).replicated_ops
    assert [(op.op, op.count) for op in found] == [("aten.special_i0.default", 1)]
    assert "test_unruled.py" in found[0].source
    assert found[0].seconds > 0
    assert _plan(ruled=True, dp=8).replicated_ops == ()
    assert "aten.special_i0.default" in _plan(ruled=False, dp=8).explain()


def test_what_data_ranks_cannot_divide_costs_them_all_of_it():
    ruled, unruled = _plan(ruled=True, dp=8), _plan(ruled=False, dp=8)
    kept = [plan.prediction.ranks[0].bytes_by_cause["activations"] for plan in (ruled, unruled)]
    assert kept[1] > 4 * kept[0]  # eight ranks' sequences beside this one's own
    assert unruled.prediction.step_s > ruled.prediction.step_s
