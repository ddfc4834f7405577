"""Every op of the model zoo has a rule, and rules split its matmuls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.solver.hardware import Cluster
from tests.zoo import ZOO

USES = [(name, attention) for name, model in ZOO.items() for attention in model.attentions]


@pytest.mark.parametrize(("name", "attention"), USES)
def test_every_op_of_the_zoo_has_a_rule_and_every_matmul_splits(name: str, attention: str) -> None:
    model = ZOO[name]
    found = autopar.ops(model.build(attention), example_batch=model.inputs(), loss_fn=model.loss_fn)
    assert found.without_rule == ()
    assert found.rule_coverage == 1
    assert found.matmul_flops > 0
    assert found.split_flops_fraction >= 0.99, found.unsplit


class _Mixed(nn.Module):
    """A matmul that splits and one that does not: 3 columns, and 5 rows that are a softmax row."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(5, 8, bias=False)
        self.bad = nn.Parameter(torch.zeros(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.cummax(x, -1).values @ self.bad
        return self.good(x).sum(-1).mean() + scores.mean()


def test_what_is_not_split_is_named_with_its_share_and_what_has_no_rule_with_its_cost() -> None:
    """``good`` does 2·5·8 FLOPs a row, ``bad`` 2·5·3, whose odd dims do not halve."""
    found = autopar.ops(_Mixed(), Cluster("cpu-local"), example_batch={"x": torch.zeros(4, 5)})
    assert found.split_flops_fraction == pytest.approx(8 / 11)
    ((op, source, share),) = found.unsplit
    assert op.startswith("aten.")
    assert share == pytest.approx(3 / 11)
    assert "test_coverage.py" in source
    (without,) = found.without_rule
    assert (without.op, without.count) == ("aten.cummax.default", 1)
    assert without.seconds > 0
    assert without.rule is None


def test_batch_and_sequence_are_no_split_of_a_weight() -> None:
    """Only the rows of ``x`` are even: every dim of the weight is odd."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).mean()

    found = autopar.ops(Odd(), Cluster("cpu-local"), example_batch={"x": torch.zeros(4, 6, 5)})
    assert found.split_flops_fraction == 0


def test_repeated_blocks_are_counted_as_often_as_they_occur() -> None:
    model = ZOO["llama"]
    counts: list[int] = []
    for layers in (2, 5):
        found = autopar.ops(model.build(layers=layers), example_batch=model.inputs())
        counts.append(sum(use.count for use in found.uses if use.op == "aten.linear.default"))
    assert counts == [2 * 7 + 1, 5 * 7 + 1]
