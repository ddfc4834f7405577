"""Routed experts compute what a loop over tokens computes, whole and with their experts split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.errors import InputError
from autopar.ir.experts import ACTIVATIONS, expert_dispatch, routed_experts
from autopar.runtime.threads import run_ranks, thread_groups


def floats(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_token(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor,
    down_bias: Tensor,
    *,
    capacity: int | None = None,
) -> Tensor:
    """The definition, token by token: gated SiLU experts, ``hidden`` is ``[b, s, h]``."""
    sequences: list[Tensor] = []
    for sequence, (tokens, chosen) in enumerate(zip(hidden, ids.tolist(), strict=True)):
        taken = [0] * up.shape[0]
        rows: list[Tensor] = []
        for place, token in enumerate(tokens):
            row = torch.zeros_like(token)
            for slot, expert in enumerate(chosen[place]):
                if not 0 <= expert < up.shape[0]:
                    continue
                taken[expert] += 1
                if capacity is not None and taken[expert] > capacity:
                    continue
                gate, rest = (up[expert] @ token + up_bias[expert]).chunk(2)
                inner = nn.functional.silu(gate) * rest
                result = down[expert] @ inner + down_bias[expert]
                row = row + weights[sequence, place, slot] * result
            rows.append(row)
        sequences.append(torch.stack(rows))
    return torch.stack(sequences)


def example(num_experts: int = 4) -> tuple[Tensor, ...]:
    ids = torch.tensor([[[0, 1], [0, 3], [0, 2], [3, 0]], [[1, 0], [-1, 3], [3, 9], [0, 1]]])
    return (
        floats(2, 4, 3),
        ids,
        floats(2, 4, 2),
        floats(num_experts, 10, 3),
        floats(num_experts, 3, 5),
        floats(num_experts, 10),
        floats(num_experts, 3),
    )


def gradients(result: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    seed = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
    graded = [tensor for tensor in tensors if tensor.requires_grad]
    return list(torch.autograd.grad(result, graded, seed, retain_graph=True))


@pytest.mark.parametrize(("capacity_factor", "capacity"), [(None, None), (0.5, 1), (1.1, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_the_sum_over_each_tokens_experts(
    capacity_factor: float | None, capacity: int | None, transposed: bool
) -> None:
    """4 tokens choose 2 of 4 experts: expert 0 is chosen by all tokens of the first sequence."""
    hidden, ids, weights, up, down, *biases = tensors = example()
    if transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    found = routed_experts(
        hidden,
        ids,
        weights,
        up,
        down,
        *biases,
        activation="silu",
        gated=True,
        transposed=transposed,
        capacity_factor=capacity_factor,
    )
    expected = by_token(*tensors, capacity=capacity)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(one, other)


def test_a_capacity_drops_tokens_by_position() -> None:
    """Five tokens want one expert of two, which takes ceil(0.8 · 5 / 2) = 2 of each sequence."""
    hidden = torch.ones(2, 5, 1, dtype=torch.float64)
    ids = torch.zeros(2, 5, 1, dtype=torch.int64)
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    found = routed_experts(
        hidden,
        ids,
        torch.ones(2, 5, 1, dtype=torch.float64),
        one,
        one,
        activation="identity",
        gated=False,
        capacity_factor=0.8,
    )
    assert found.flatten(1).tolist() == [[1, 1, 0, 0, 0]] * 2


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[[0, 1], [2, 3]], [[3, 0], [1, 2]]], id="all ranks get tokens"),
        pytest.param([[[0, 1], [1, 0]], [[0, 1], [0, 1]]], id="a rank gets no token"),
        pytest.param([[[2, 3], [-1, 9]], [[-1, -1], [9, -1]]], id="a rank sends none"),
        pytest.param([[[-1, -1], [-1, -1]], [[-1, -1], [-1, -1]]], id="nobody sends any"),
    ],
)
def test_dispatched_experts_equal_whole_ones(
    ids: list[list[list[int]]], capacity_factor: float | None
) -> None:
    tensors = (
        floats(2, 2, 3),
        torch.tensor(ids),
        floats(2, 2, 2),
        floats(4, 10, 3),
        floats(4, 3, 5),
        floats(4, 10),
        floats(4, 3),
    )
    hidden, chosen, *rest = tensors
    whole = routed_experts(
        hidden, chosen, *rest, activation="silu", gated=True, capacity_factor=capacity_factor
    )
    seed = torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view_as(whole)
    graded = [tensor for tensor in tensors if tensor.requires_grad]
    expected = torch.autograd.grad(whole, graded, seed)
    groups = thread_groups("ep", 2)

    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        local = [tensor.detach().chunk(2)[rank] for tensor in tensors]
        for tensor in local:
            tensor.requires_grad_(tensor.is_floating_point())
        tokens, ids_of_rank, weights, up, down, up_bias, down_bias = local
        result = expert_dispatch(
            tokens,
            ids_of_rank,
            weights,
            up,
            down,
            up_bias,
            down_bias,
            groups[rank],
            activation="silu",
            gated=True,
            transposed=False,
            capacity_factor=capacity_factor,
        )
        own = [tensor for tensor in local if tensor.requires_grad]
        return result.detach(), list(torch.autograd.grad(result, own, seed.chunk(2)[rank]))

    outcomes = run_ranks(2, run, meetings=[groups[0].meeting])
    torch.testing.assert_close(torch.cat([result for result, _ in outcomes]), whole.detach())
    for index, gradient in enumerate(expected):
        found = torch.cat([grads[index] for _, grads in outcomes])
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_has_gradients(name: str) -> None:
    hidden = example()[0]
    ids = example()[1].clamp(0, 3)
    weights, up, down = floats(2, 4, 2), floats(4, 5, 3), floats(4, 3, 5)

    def experts(hidden: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return routed_experts(hidden, ids, weights, up, down, activation=name, gated=False)

    assert torch.autograd.gradcheck(experts, (hidden, weights, up, down))


def test_export_keeps_the_op_whole_and_meta_tensors_run_through_it() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4, device="meta")
            self.up = nn.Parameter(torch.empty(4, 16, 8, device="meta"))
            self.down = nn.Parameter(torch.empty(4, 8, 8, device="meta"))

        def forward(self, hidden: Tensor) -> Tensor:
            weights, ids = self.router(hidden).softmax(-1).topk(2, -1)
            settings = {"activation": "silu", "gated": True}
            return routed_experts(hidden, ids, weights, self.up, self.down, **settings)  # type: ignore[arg-type]

    model, hidden = Routed(), torch.empty(3, 5, 8, device="meta")
    program = torch.export.export(
        model, (hidden,), dynamic_shapes=({0: torch.export.Dim("b")},), strict=False
    )
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets[-1] is torch.ops.autopar.routed_experts.default
    result = model(hidden)
    result.sum().backward()
    assert result.shape == hidden.shape
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish2"}, "no activation 'swish2'.*\n.*\n.*gelu"),
        ({"gated": False}, r"shapes do not fit: hidden \[2, 4, 3\]"),
        ({"transposed": True}, r"up \[4, 10, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"activation": "silu", "gated": True, **change}
    with pytest.raises(InputError, match=message):
        routed_experts(*example(), **settings)  # type: ignore[arg-type]
