"""Families of the zoo with dropout wherever they have it train and evaluate as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.ir.mesh import Mesh
from autopar.passes import lower_evaluation, lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.threads import run_mesh
from tests.runtime.cases import Setup
from tests.runtime.laid_out import assert_equals_reference, laid_out
from tests.zoo import ZOO

CASES = [
    # encoder output and relative biases go to all decoder layers, on later stages
    ("t5", Mesh(pp=2, tp=2), "selective_op"),
    ("t5", Mesh(pp=3), "full"),
    ("bert", Mesh(dp_shard=2, tp=2), "full"),
    ("gpt_neox", Mesh(tp=4), "selective"),
    ("torch_encoder", Mesh(pp=2, dp_shard=2), "full"),
]

_ATTRIBUTES = ("attention_dropout", "dropout", "attn_dropout")
"""Names under which modules keep the probability of their attention's dropout."""


@pytest.mark.parametrize(("name", "mesh", "recompute"), CASES)
def test_families_with_dropout_equal_one_device(name: str, mesh: Mesh, recompute: str) -> None:
    family = ZOO[name]
    module, batch = with_dropout(family.build()), family.inputs(4)
    setup = Setup(
        mesh=mesh,
        zero_stage=3 if mesh.dp_shard > 1 else 0,
        recompute=recompute,  # type: ignore[arg-type]
    )
    case = laid_out(module, batch, setup, micro_batch_size=1, loss_fn=family.loss_fn)
    assert_equals_reference(case, batch)

    graph = capture(module, batch, loss_fn=family.loss_fn, training=False)
    evaluation = lower_evaluation(case.model, case.plan, graph)
    program = lower_plan(case.model, case.plan)

    def run(communicator: Communicator) -> float:
        engine = Engine(program, case.model, case.plan, communicator)
        engine.load_parameters(case.weights)
        engine.set_evaluation(*evaluation)
        return engine.eval_step(batch).loss

    module.eval()
    with torch.no_grad():
        expected = family.loss(module, batch).item()
    for loss in run_mesh(mesh, run):
        assert loss == pytest.approx(expected, abs=1e-5)


def with_dropout(module: nn.Module, p: float = 0.2) -> nn.Module:
    changed = 0
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p, changed = p, changed + 1
        for name in _ATTRIBUTES:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, p)
                changed += 1
    assert changed > 2
    return module
