"""What each sequence picks from itself is a gather: sequences may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.rules.registry import rule_of
from autopar.ir.typecheck import is_op
from tests.capture.helpers import assert_same_training

_aten = torch.ops.aten
Pick = Callable[[Tensor, Tensor], Tensor]


def one(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device), ids[:, 0]]


def from_the_end(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device), ids[:, 0] - 5]


def several(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), ids]


def of_scalars(x: Tensor, ids: Tensor) -> Tensor:
    return x.sum(-1)[torch.arange(x.shape[0], device=x.device), ids[:, 0]]


def of_the_first_sequence(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device) * 0, ids[:, 0]]


@pytest.mark.parametrize(
    ("pick", "gathers"),
    [
        (one, True),
        (from_the_end, True),
        (several, True),
        (of_scalars, True),
        (of_the_first_sequence, False),
    ],
)
def test_entries_that_sequences_pick_from_themselves_are_gathered(
    pick: Pick, gathers: bool
) -> None:
    batch = {"input": torch.randn(4, 5, 6), "ids": torch.randint(0, 5, (4, 3))}

    def loss_fn(x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return pick(x, batch["ids"]).square().mean()

    graph = assert_same_training(nn.Linear(6, 6), batch, loss_fn, tolerance=1e-5)
    nodes = [node for kind in graph.kinds.values() for node in kind.graph.nodes if is_op(node)]
    targets = {node.target for node in nodes}
    assert (_aten.gather.default in targets) is gathers
    assert (_aten.index.Tensor in targets) is not gathers
    for node in nodes:
        if node.target is _aten.gather.default:
            rule = rule_of(node)
            assert rule is not None
            assert rule.split_factors()[0] == "d0"  # sequences
