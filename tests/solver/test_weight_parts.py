"""What backwards in two parts cost: half of every product, and what lives between the parts."""

from __future__ import annotations

import pytest

from autopar.capture import capture
from autopar.ir.families import Family, family_of
from autopar.ir.layout import operands_of
from autopar.solver.costs.work import backward_work, computing_nodes, global_shapes, weight_work
from autopar.solver.layout.model_facts import model_facts
from tests.zoo import ZOO


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "vit"])
def test_a_weight_part_is_half_of_the_backward_of_a_product(name: str):
    """Where both operands take gradients. Attention and all else have no weight part."""
    family = ZOO[name]
    model = capture(family.build(), family.inputs(2), loss_fn=family.loss_fn)
    facts = model_facts(model)
    last = model.blocks[model.producer(model.loss)[0]].kind
    seen = 0
    for kind in model.kinds.values():
        for node in computing_nodes(kind):
            weights = facts.weights[kind.name].get(node)
            if weights is None:
                continue
            assert kind.name != last
            seen += 1
            assert family_of(node) in (Family.PRODUCT, Family.EXPERTS)
            shapes = global_shapes(node)
            whole, part = backward_work(node, *shapes), weight_work(node, *shapes, weights)
            assert 2 * part.flops == whole.flops
            assert set(part.products) < set(whole.products)
            assert len(operands_of(node)) > len(weights)
    assert seen > 3


def test_frozen_weights_have_no_part():
    family = ZOO["llama"]
    module = family.build()
    for path, parameter in module.named_parameters():
        parameter.requires_grad_("proj" not in path)
    model = capture(module, family.inputs(2), loss_fn=family.loss_fn)
    assert not any(model_facts(model).weights.values())
