"""Sizes that nothing divides: other factors are split, or dims padded, or the pin is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.errors import InputError
from autopar.ir.plan import Plan
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.threads import run_mesh
from autopar.solver.hardware import Cluster
from autopar.solver.solve import solve
from tests.models import tiny_gpt2, tiny_llama, token_batch
from tests.plans import SGD
from tests.zoo_runs import ZooCase, assert_like_one_device, make_case

FOUR = Cluster("a100-80gb", gpus_per_node=4)
TWO = Cluster("a100-80gb", gpus_per_node=2)


def case_of(module: nn.Module, vocab: int = 128) -> ZooCase:
    batch = token_batch(8, vocab=vocab)
    return make_case(module, batch, module(**batch).loss)


def plan_of(case: ZooCase, cluster: Cluster, **pin: Any) -> Plan:
    return solve(case.model, cluster, global_batch_size=8, training=SGD, pin=pin)


def placement(plan: Plan, name: str) -> str:
    (found,) = (p for names, p in plan.parameters.items() if names.endswith(name))
    return found.placement[plan.layout_axes.index("tp")]


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide_is_padded(tied: bool):
    """Head and loss are split, whatever the vocabulary; nothing gathers the logits."""
    vocab = 101
    case = case_of(tiny_llama(vocab_size=vocab, tie_word_embeddings=tied)[0], vocab)
    plan = plan_of(case, TWO, tp=2)
    head = "embed_tokens.weight" if tied else "lm_head.weight"
    assert placement(plan, head) == "S(0, 101 padded)"
    assert_like_one_device(case, plan)


def test_padding_is_stripped_from_what_is_saved_and_stays_zero(tmp_path):
    case = case_of(tiny_gpt2(vocab_size=101)[0], 101)
    plan = plan_of(case, TWO, tp=2)
    assert "padded" in placement(plan, "wte.weight")
    program = lower_plan(case.model, plan)
    name = next(name for name in case.model.parameters if name.endswith("wte.weight"))

    def steps(communicator: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        engine = Engine(program, case.model, plan, communicator)
        engine.load_parameters(case.parameters)
        engine.train_step(case.batch)
        engine.save(tmp_path / "checkpoint")
        trained = engine.full_parameters()[name]
        engine.load_parameters(case.parameters)
        engine.load(tmp_path / "checkpoint")
        return trained, engine.full_parameters()[name], engine.store.parameters[name].detach()

    trained, loaded, held = run_mesh(plan.device_mesh(), steps)[1]
    assert trained.shape == case.model.parameters[name].shape == (101, 64)
    assert torch.equal(trained, loaded)
    assert not torch.equal(trained, case.parameters[name])
    assert held.shape == (51, 64)
    assert not held[50:].any()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, "fewer key-value heads than ranks"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, "one key-value head"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "fewer heads than ranks"),
        ({"intermediate_size": 130}, "features that do not divide"),
        ({"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3}, "three heads"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_heads_and_features_that_do_not_divide(settings: dict[str, int], what: str):
    case = case_of(tiny_llama(**settings)[0])
    assert_like_one_device(case, plan_of(case, FOUR, tp=4))


@pytest.mark.parametrize(("layers", "pp", "cluster"), [(7, 2, TWO), (5, 4, FOUR)])
def test_layers_that_do_not_divide_among_stages(layers: int, pp: int, cluster: Cluster):
    case = case_of(tiny_llama(layers)[0])
    plan = plan_of(case, cluster, pp=pp)
    sizes = [0] * pp
    for segment in plan.segments:
        sizes[segment.stage] += segment.last_block - segment.first_block + 1
    assert sum(sizes) == layers + 2
    assert_like_one_device(case, plan)


@pytest.mark.parametrize(
    ("pin", "said"),
    [({"cp": 3}, "cp=3"), ({"ep": 2}, "no routed experts"), ({"pp": 8}, "pp=8")],
)
def test_pins_that_the_model_cannot_have_are_refused_by_name(pin: dict[str, int], said: str):
    case = case_of(tiny_llama(2)[0])
    with pytest.raises(InputError, match=said):
        plan_of(case, Cluster("a100-80gb", gpus_per_node=24), **pin)
