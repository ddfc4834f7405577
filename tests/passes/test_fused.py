"""Fused and grouped projections split per logical block: Megatron's collectives, exact gradients.

Weights are pinned on the tensor axis, and activations are whole between blocks. Were a weight cut
across its blocks, the activations inside of a layer would have to be gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture, run_reference
from autopar.ir.graph import Role, TensorInfo, ValueId
from autopar.ir.mesh import TENSOR_AXIS, Mesh
from autopar.ir.placement import INVARIANT, REPLICATED, State, parse_state, sharded
from autopar.ir.plan import SegmentPlan
from autopar.ir.rules.core import Option
from autopar.passes import lower, plan_moves
from tests.passes.harness import Outcome, run_program
from tests.passes.layouts import Pin, cheapest, choose_layout
from tests.passes.reference import assert_same
from tests.zoo import ZOO, LossFn

ONLY = {
    ("none", "none"),
    ("all_reduce", "none"),
    ("none", "all_reduce"),
    ("all_reduce", "all_reduce"),
}

FUSED: dict[str, dict[str, str]] = {
    # every head has its own query, key and value: rows (heads 3 features)
    "gpt_neox": {
        "query_key_value": "S(0)",
        "attention.dense": "S(1)",
        "h_to_4h": "S(0)",
        "4h_to_h": "S(1)",
    },
    "bloom": {
        "query_key_value": "S(0)",
        "attention.dense": "S(1)",
        "h_to_4h": "S(0)",
        "4h_to_h": "S(1)",
    },
    # blocks of 4 query heads, 2 key heads, 2 value heads; gate and up
    "phi3": {
        "qkv_proj": "S(0, 2:1:1)",
        "o_proj": "S(1)",
        "gate_up_proj": "S(0, 1:1)",
        "down_proj": "S(1)",
    },
    # three blocks of all heads; weights are [in, out]
    "gpt2": {
        "c_attn": "S(1, 1:1:1)",
        "attn.c_proj": "S(0)",
        "c_fc": "S(1)",
        "mlp.c_proj": "S(0)",
    },
    "nanogpt": {"c_attn": "S(0, 1:1:1)", "c_proj": "S(1)", "mlp.0": "S(0)", "mlp.2": "S(1)"},
    # nn.MultiheadAttention
    "torch_encoder": {
        "in_proj": "S(0, 1:1:1)",
        "out_proj": "S(1)",
        "linear1": "S(0)",
        "linear2": "S(1)",
    },
}
"""Weights of layers by a part of their names, and how a rank holds them."""

GROUPED = {
    "q_proj": "S(0, 1:1)",
    "k_proj": "R",
    "v_proj": "R",
    "o_proj": "S(1, 1:1)",
    "gate_proj": "S(0)",
    "up_proj": "S(0)",
    "down_proj": "S(1)",
}
"""Two groups of four query heads over four ranks: each group is split, keys and values are whole
on every rank, and the gradients of their weights are sums over ranks.
"""


def pinned(states: Mapping[str, str], *, transposed: bool = False) -> Pin:
    def pin(value: ValueId, tensor: TensorInfo, axis: str) -> State:
        if axis != TENSOR_AXIS or value.role is not Role.PARAMETER:
            return INVARIANT
        for part, text in states.items():
            if part in value.name and "norm" not in value.name:
                state = parse_state(text)
                if len(tensor.shape) > 1 or not state.is_sharded:
                    return state
                columns = state.dim == (1 if transposed else 0)
                return sharded(0, state.blocks) if columns else INVARIANT
        return INVARIANT

    return pin


def whole_stays_whole(node: fx.Node, options: Sequence[Option], given: Sequence[State]) -> Option:
    """The cheapest option, but nothing is sharded where no operand is (a residual stream is not
    scattered because that halves an all-reduce), what is replicated stays so, and keys are repeated
    for the query heads of a rank alone.
    """
    if any(state.is_sharded for state in given):
        return cheapest(node, options, given)
    if node.target is torch.ops.aten.expand.default:
        heads = [option for option in options if option.results[0] == sharded(2)]
        if heads:
            return heads[0]
    whole = [
        option
        for option in options
        if not any(state.is_sharded for state in (*option.operands, *option.results))
    ]
    if REPLICATED in given:
        whole = [option for option in whole if set(option.operands) == {REPLICATED}]
    return cheapest(node, whole or options, given)


def check(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    states: Mapping[str, str],
    tp: int,
    loss_fn: LossFn | None = None,
    *,
    transposed: bool = False,
) -> None:
    """Layers under these states send nothing but whole activations, and train as on one device."""
    graph = capture(model.double(), dict(inputs), loss_fn=loss_fn, compute_dtype=torch.float64)
    mesh, batch = Mesh(tp=tp), next(iter(inputs.values())).shape[0]
    pin = pinned(states, transposed=transposed)
    layout = choose_layout(graph, mesh, batch=batch, pin=pin, choose=whole_stays_whole)
    layers = {kind for kind, count in graph.multiplicity().items() if count > 1}
    moves = plan_moves(graph, layout, mesh=mesh, micro_batch_size=batch)
    found = [move for move in moves if move.kind in layers]
    assert found
    assert {(move.forward, move.backward) for move in found} <= ONLY, found
    last = len(graph.blocks) - 1
    program = lower(
        graph,
        layout,
        mesh=mesh,
        micro_batch_size=batch,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=last)],
    )
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: named[name].detach() for name in graph.parameters}
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    loss, weight = run_reference(graph, leaves, inputs)
    loss.backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    expected = Outcome(loss=loss.detach(), weight=weight, gradients=gradients)
    assert_same(run_program(program, graph, mesh, parameters, inputs), expected)


CASES = [
    ("gpt_neox", 2, "sdpa"),
    ("gpt_neox", 4, "eager"),
    ("bloom", 4, "eager"),
    ("phi3", 2, "sdpa"),
    ("phi3", 2, "eager"),
    ("gpt2", 4, "sdpa"),
    ("nanogpt", 2, "sdpa"),
    ("torch_encoder", 4, "sdpa"),
]


@pytest.mark.parametrize(("name", "tp", "attention"), CASES)
def test_fused_projections_split_by_block(name: str, tp: int, attention: str) -> None:
    zoo = ZOO[name]
    module = zoo.build(attention)
    check(module, zoo.inputs(), FUSED[name], tp, zoo.loss_fn, transposed=name == "gpt2")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fewer_key_heads_than_ranks_are_whole_while_their_groups_split(attention: str) -> None:
    """8 query heads, 2 key heads, 4 ranks; eager attention repeats keys by expand and reshape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    check(model, {"input_ids": tokens, "labels": tokens}, GROUPED, 4)
