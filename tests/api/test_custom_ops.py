"""A user's own op: its rule is registered, proved, listed, and splits the op in a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.ir.errors import InputError, RuleError
from autopar.ir.graph import TensorInfo, ValueId
from autopar.ir.mesh import TENSOR_AXIS, Mesh
from autopar.ir.placement import INVARIANT, State, sharded
from autopar.ir.plan import SegmentPlan
from autopar.ir.rules.registry import unregister
from autopar.passes import lower
from tests.passes.harness import run_program
from tests.passes.layouts import cheapest, choose_layout

RULE = "b n k, k m, m -> b n m"
LINEAR = [("x", "bias"), ("weight", "bias")]


@torch.library.custom_op("autopar_test::scaled_linear", mutates_args=())
def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    found = x @ weight * scale
    return found if bias is None else found + bias


@scaled_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.scale = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    to_weight = torch.einsum("bnk,bnm->km", x, gradient) * ctx.scale
    bias = gradient.sum((0, 1)) if ctx.biased else None
    return gradient @ weight.T * ctx.scale, to_weight, bias, None


scaled_linear.register_autograd(_backward, setup_context=_keep)


@pytest.fixture(autouse=True)
def forget_rules() -> Iterator[None]:
    yield
    unregister("autopar_test::scaled_linear")


def drawn(size: Any) -> tuple[Any, ...]:
    x, weight = torch.randn(size("b"), size("n"), size("k")), torch.randn(size("k"), size("m"))
    return x, weight, torch.randn(size("m")), 0.5


def test_a_right_rule_is_proved_on_given_and_drawn_examples() -> None:
    autopar.register_rule(scaled_linear, RULE, linear=LINEAR, additive=["bias"])
    given = autopar.prove_rule(
        scaled_linear, torch.randn(4, 4, 8), torch.randn(8, 4), None, 0.5, axis_sizes=(2, 4)
    )
    assert given == 2 * (4 + 2 + 2)  # b, n, k, m; all I, all R; P in x, P in weight
    assert autopar.prove_rule("autopar_test::scaled_linear", drawn) > 100


@pytest.mark.parametrize(
    ("rule", "marks", "said"),
    [
        (
            "b n k, k m, m -> b n m",
            {},
            r"factor k split over \d ranks of axis tp.*result 0 is wrong by up to",
        ),
        (
            "b n k, k m, !m -> n b m",
            {"additive": ["bias"]},
            r"factor b split.*shape \(2, 4, 4\) on a rank, not \(4, 2, 4\)",
        ),
        (
            "b n k, k m, m -> b n m",
            {"additive": ["bias"], "linear": ["x"]},
            r"no factor split over \d ranks of axis tp \(P, R, R -> P\).* wrong by up to",
        ),
    ],
    ids=["the bias is added on every rank", "dims are swapped", "affine, not linear"],
)
def test_a_wrong_rule_is_refuted_with_factor_axis_and_error(
    rule: str, marks: dict[str, Any], said: str
) -> None:
    """Sizes of ``b`` and ``n`` are equal, so that swapping them fits the shapes."""
    autopar.register_rule(scaled_linear, rule, **marks)
    args = (torch.randn(4, 4, 8), torch.randn(8, 4), torch.randn(4), 0.5)
    with pytest.raises(RuleError, match=f"the rule is wrong: autopar_test.*{said}"):
        autopar.prove_rule(scaled_linear, *args)


@pytest.mark.parametrize(
    ("op", "rule", "marks", "message"),
    [
        (scaled_linear, "b n k, k m", {}, "no '->'"),
        (scaled_linear, "b n k, k m -> b n m", {}, "the op has 3: x, weight, bias"),
        (scaled_linear, RULE, {"additive": ["offset"]}, "no tensor argument 'offset'"),
        (scaled_linear, "b* k, k m, m -> b m", {}, r"cannot read 'b\*'"),
        ("scaled_linear", RULE, {}, "no name of an op"),
        (None, RULE, {}, "None is no op"),
        (scaled_linear, None, {}, "a rule is a text, not None"),
    ],
)
def test_rules_that_do_not_fit_the_op_are_refused(
    op: Any, rule: str, marks: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        autopar.register_rule(op, rule, **marks)


def test_what_cannot_be_proved_is_said() -> None:
    with pytest.raises(InputError, match="no rule to prove"):
        autopar.prove_rule(scaled_linear, torch.randn(4, 4, 8), torch.randn(8, 4), None, 0.5)
    with pytest.raises(InputError, match="there is no op"):
        autopar.prove_rule("autopar_test::nothing", torch.randn(4))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = scaled_linear(x, self.up, None, 0.5)
        return scaled_linear(hidden.relu(), self.down, self.bias, 2.0).square().mean()


def _column_then_row(value: ValueId, tensor: TensorInfo, axis: str) -> State:
    states = {"up": sharded(1), "down": sharded(0)}
    if axis == TENSOR_AXIS:
        return states.get(value.name, INVARIANT)
    return INVARIANT


def test_a_registered_op_is_listed_with_its_rule_and_split_by_layouts() -> None:
    model, x = _Model(), torch.randn(4, 5, 6, dtype=torch.float64)
    before = autopar.ops(model, example_batch={"x": x})
    assert [use.op for use in before.without_rule] == ["autopar_test.scaled_linear.default"]
    autopar.register_rule(scaled_linear, RULE, linear=LINEAR, additive=["bias"])
    after = autopar.ops(model, example_batch={"x": x})
    assert after.without_rule == ()
    assert {use.rule for use in after.uses if "scaled" in use.op} == {
        "b n k, k m -> b n m",
        "b n k, k m, m -> b n m",
    }

    graph, mesh = capture(model, {"x": x}, compute_dtype=torch.float64), Mesh(tp=2)
    layout = choose_layout(graph, mesh, batch=4, pin=_column_then_row, choose=cheapest)
    program = lower(
        graph,
        layout,
        mesh=mesh,
        micro_batch_size=4,
        segments=[SegmentPlan(stage=0, first_block=0, last_block=len(graph.blocks) - 1)],
    )
    assert program.parameters["up"].shape == (6, 4)
    assert program.parameters["down"].shape == (4, 6)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = run_program(program, graph, mesh, parameters, {"x": x})
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


def test_the_snippets_of_the_guide_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "custom-ops.md"
    snippets = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    exec("\n".join(snippets), names)
    unregister("mylib::scores")
    assert names["tried"] > 0
    assert names["drawn"] > 100
    assert names["result"].shape == names["hidden"].shape
