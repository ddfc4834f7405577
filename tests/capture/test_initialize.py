"""Initial weights are those of their names, one at a time, and distributed as the model has it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.initialize import InitialWeights, NotSeparableError
from autopar.capture.meta import meta_parameters
from autopar.capture.sources import ModuleSource
from tests.models import tiny_gpt2, tiny_llama, tiny_transformer
from tests.zoo import ZOO

FAMILIES = sorted(
    name for name, model in ZOO.items() if "transformers" in type(model.build()).__module__
)


def on_meta(name: str) -> nn.Module:
    model = ZOO[name]
    with meta_parameters():
        return model.make(model.attentions[0], model.layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_distributed_as_the_family_has_it(name: str) -> None:
    """Mean, deviation and zeros of every parameter are those of the model built whole."""
    model = ZOO[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = model.make(model.attentions[0], model.layers)
    values = InitialWeights(on_meta(name), 0)
    for path, parameter in whole.named_parameters(remove_duplicate=False):
        value, expected = values[path], parameter.detach()
        assert value.shape == expected.shape
        assert abs(int((value == 0).sum()) - int((expected == 0).sum())) <= 2, path
        if expected.numel() < 2 or expected.std() == 0:
            torch.testing.assert_close(value, expected, msg=path)
            continue
        error = 5 * expected.std() / expected.numel() ** 0.5  # five standard errors
        assert abs(value.mean() - expected.mean()) <= 1.5 * error, path
        assert abs(value.std() - expected.std()) <= error, path


def test_a_value_depends_on_seed_and_name_alone() -> None:
    one, other = InitialWeights(on_meta("gpt2"), 3), InitialWeights(on_meta("gpt2"), 3)
    last = list(one)[-1]
    first_asked = one[last]
    for name in other:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    torch.testing.assert_close(other[last], first_asked, rtol=0, atol=0)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(InitialWeights(on_meta("gpt2"), 4)[name], one[name])
    assert not torch.equal(one[name.replace("h.0", "h.1")], one[name])


def test_tied_weights_are_drawn_once() -> None:
    values = InitialWeights(on_meta("gpt2"), 0)
    head, embedding = values["lm_head.weight"], values["transformer.wte.weight"]
    torch.testing.assert_close(head, embedding, rtol=0, atol=0)
    filled = dict(values.fill("cpu").named_parameters(remove_duplicate=False))
    assert filled["lm_head.weight"] is filled["transformer.wte.weight"]
    torch.testing.assert_close(filled["lm_head.weight"].detach(), head, rtol=0, atol=0)


def test_residual_projections_of_gpt2_are_scaled_by_its_depth() -> None:
    with meta_parameters():
        deep, _ = tiny_gpt2(8)
    values = InitialWeights(deep, 0)
    std = 0.02
    assert values["transformer.h.3.mlp.c_fc.weight"].std() == pytest.approx(std, rel=0.05)
    scaled = values["transformer.h.3.mlp.c_proj.weight"].std()
    assert scaled == pytest.approx(std / 16**0.5, rel=0.05)


def test_one_parameter_at_a_time_has_memory() -> None:
    """At most the largest parameter lives (and the state of the generator, 5 kB): no rank needs the
    model.
    """
    with meta_parameters():
        model, _ = tiny_llama(2, vocab_size=1024)
    largest = max(parameter.numel() for parameter in model.parameters())
    with _Allocations() as seen:
        values = InitialWeights(model, 0)
        for name in values:
            assert values[name].shape == model.get_parameter(name).shape
    assert largest <= seen.peak < 1.1 * largest


class _Allocations(TorchDispatchMode):
    """Counts the elements of all storages that were made while it is active, and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and type(made) is Tensor and not made.is_meta:
            storage = made.untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self.live[key] = storage.nbytes() // 4
                weakref.finalize(made, self.live.pop, key, None)
                self.peak = max(self.peak, sum(self.live.values()))
        return made


def test_modules_in_memory_keep_their_values() -> None:
    module, _ = tiny_llama(1)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    module.lm_head.to("meta")
    weights: Mapping[str, Tensor] = ModuleSource(module=module).weights(seed=0)
    assert weights["lm_head.weight"].std() == pytest.approx(0.02, rel=0.1)
    for name, parameter in module.named_parameters():
        assert parameter.is_meta == (name == "lm_head.weight")
        if not parameter.is_meta:
            torch.testing.assert_close(weights[name], before[name], rtol=0, atol=0)
            torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def test_modules_of_torch_say_themselves_how_they_start() -> None:
    module, _, _ = tiny_transformer(1)
    values = InitialWeights(module.to("meta"), 0)
    assert torch.equal(values["norm.weight"], torch.ones(64))
    assert values["tokens.weight"].std() == pytest.approx(1, rel=0.05)
    assert values["layers.0.up.weight"].abs().max() <= 64**-0.5


def test_what_the_constructor_alone_knows_is_said() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(NotSeparableError, match="parameter scale is on the meta device"):
        InitialWeights(module, 0)
