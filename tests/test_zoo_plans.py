"""Plans of the solver for models of the zoo run with the numbers of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.ir.errors import CaptureError
from autopar.ir.plan import Plan
from autopar.solver.hardware import Cluster
from autopar.solver.solve import solve
from tests.plans import SGD
from tests.zoo_runs import assert_like_one_device, make_case, zoo_case

PINS: dict[str, dict[str, int | str]] = {
    "context": {"cp": 2, "tp": 1, "pp": 1},
    "context-tensor": {"cp": 2, "tp": 2, "pp": 1},
    "context-zero": {"cp": 4, "tp": 1, "pp": 1, "zero_stage": 3},
    "context-pipeline": {"cp": 2, "pp": 2, "recompute": "full"},
    "expert": {"ep": 2, "dp_shard": 2, "tp": 1, "pp": 1, "zero_stage": 3},
    "expert-tensor": {"ep": 2, "tp": 2, "pp": 1},
    "expert-context": {"ep": 2, "cp": 2, "pp": 1, "zero_stage": 1},
    "expert-pipeline": {"ep": 2, "pp": 2, "schedule": "layered"},
    "zero-bubble": {"ep": 2, "pp": 2, "schedule": "zero_bubble", "extra_in_flight": 1},
}
CASES = [
    *((name, pins) for name in ("llama", "mistral", "gemma2") for pins in list(PINS)[:4]),
    *((name, pins) for name in ("mixtral", "qwen3_moe") for pins in list(PINS)[4:-1]),
    ("mixtral", "zero-bubble"),
]


def plan_of(name: str, pins: str) -> Plan:
    return solve(
        zoo_case(name).model,
        Cluster("a100-80gb", gpus_per_node=4),
        global_batch_size=8,
        training=SGD,
        pin=PINS[pins],
    )


@pytest.mark.parametrize(("name", "pins"), CASES)
def test_context_and_expert_axes_keep_loss_and_gradients(name: str, pins: str) -> None:
    plan = plan_of(name, pins)
    assert_like_one_device(zoo_case(name), plan)


class _Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mix = nn.LSTM(16, 16, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.mix(self.embed(ids))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_recurrent_layer_is_replicated_unless_it_draws_its_own_dropout() -> None:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 32, (8, 6))}
    module = _Recurrent(0.0)
    case = make_case(module, batch, module(**batch))
    plan = solve(
        case.model,
        Cluster("a100-80gb", gpus_per_node=4),
        global_batch_size=8,
        training=SGD,
        pin={"dp_shard": 2, "tp": 2, "zero_stage": 3},
    )
    assert [found.op for found in plan.replicated_ops] == ["aten.lstm.input"]
    assert_like_one_device(case, plan)
    with pytest.raises(CaptureError, match="draws random numbers"):
        capture(_Recurrent(0.1), batch)
