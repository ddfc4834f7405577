"""Models open from configs, functions and modules; wrong ones are refused with one clear
message.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Inputs, LossFn, capture, open_model
from autopar.capture.meta import meta_parameters
from autopar.ir.errors import CaptureError, InputError
from tests.models import tiny_llama, tiny_transformer

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def test_a_config_builds_without_weights_but_with_buffers() -> None:
    source = open_model(CONFIGS / "llama-3-8b")
    assert source.name == "llama-3-8b"
    model = source.build(device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    inv_freq = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    expected = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(inv_freq, expected)
    inputs = source.example_inputs()
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "input_ids": (2, 8192),
        "labels": (2, 8192),
    }


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-3-70b", 70_554), ("gpt2", 124), ("gpt2-xl", 1_558)]
)
def test_shipped_configs_have_true_sizes(name: str, millions: int) -> None:
    model = open_model(CONFIGS / name / "config.json").build()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


def test_building_is_reproducible_from_the_seed() -> None:
    source = open_model(CONFIGS / "llama-tiny")
    first, second, other = (source.build(device="cpu", seed=seed) for seed in (3, 3, 4))
    for name, parameter in first.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, second.get_parameter(name))
    name = "lm_head.weight"
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_tied_parameters_stay_tied_on_meta() -> None:
    model = open_model(CONFIGS / "gpt2").build()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters["lm_head.weight"] is parameters["transformer.wte.weight"]
    shared = nn.Parameter(torch.ones(2))
    with meta_parameters():
        module = nn.Module()
        module.first = shared
        module.second = shared
    assert module.first is module.second
    assert module.first.is_meta


def build_with_loss() -> tuple[nn.Module, Inputs, LossFn]:
    return tiny_transformer()


def build_alone() -> tuple[nn.Module, Inputs]:
    return tiny_llama()


def build_for_length(seq_len: int = 8) -> tuple[nn.Module, Inputs]:
    return tiny_llama(seq=seq_len)


def build_nothing() -> int:
    return 3


def build_badly() -> tuple[nn.Module, Inputs]:
    raise ValueError("no such size")


def test_a_function_is_a_source() -> None:
    source = open_model(f"{__name__}:build_with_loss")
    model = source.build()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert source.loss_fn is not None
    graph = capture(model, source.example_inputs(), loss_fn=source.loss_fn, name=source.name)
    real = source.build(device="cpu", seed=1)
    assert set(graph.parameters) == dict(real.named_parameters()).keys()
    assert open_model(f"{__name__}:build_alone").loss_fn is None


def test_a_function_may_take_the_sequence_length() -> None:
    source = open_model(f"{__name__}:build_for_length")
    assert source.example_inputs()["input_ids"].shape == (2, 8)
    assert source.example_inputs(12)["input_ids"].shape == (2, 12)
    with pytest.raises(InputError, match="does not let the sequence length be chosen"):
        open_model(f"{__name__}:build_alone").example_inputs(12)


def test_a_hugging_face_module_needs_no_inputs() -> None:
    model, _ = tiny_llama()
    source = open_model(model)
    assert source.spec is None
    assert source.build() is model
    assert source.example_inputs()["labels"].shape == (2, 16)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such/place", "there is no model at"),
        ("no_such_module:build", "cannot be imported"),
        (f"{__name__}:build_missing", "has no function"),
    ],
)
def test_a_missing_model_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_model(spec).build()


def test_functions_that_fail_or_return_something_else_are_refused() -> None:
    with pytest.raises(InputError, match="returned a int"):
        open_model(f"{__name__}:build_nothing").build()
    with pytest.raises(InputError, match=r"failed: ValueError: no such size\n.*test_sources"):
        open_model(f"{__name__}:build_badly").build()


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"model_type": "spreadsheet"})])
def test_a_config_that_is_no_transformer_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"is no (JSON|transformer config)"):
        open_model(path)


def test_a_module_without_inputs_is_refused() -> None:
    with pytest.raises(InputError, match="example inputs are needed to capture a Linear"):
        open_model(nn.Linear(2, 2)).example_inputs()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))


class _Branches(_Model):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return (x * self.weight).mean()
        return x.mean()


class _Counts(_Model):
    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return (x * self.weight).mean()


class _FixedBatch(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return (x.view(2, 4) * self.weight).mean()


class _DividesByBatch(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum() / (x.shape[0] // 3 + 1)


class _Autocast(_Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x * self.weight).mean()


class _NoLoss(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _WritesView(_Model):
    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.as_strided((2,), (1,)).mul_(2)
        return y.mean()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Branches(), "depend on the values of tensors"),
        (_Counts(), "forward writes to buffer seen"),
        (_FixedBatch(), "fixes the batch size at 2"),
        (_DividesByBatch(), "computes with its batch size"),
        (_Autocast(), "autocast region"),
        (_NoLoss(), "no scalar loss"),
        (_WritesView(), "through a view"),
    ],
)
def test_what_cannot_be_captured_is_explained(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, (torch.randn(2, 4),))
    assert caught.value.hint
    if message not in ("no scalar loss", "fixes the batch size at 2"):
        assert caught.value.where is not None
        assert "test_sources.py" in caught.value.where


def test_inputs_that_do_not_fit_are_refused() -> None:
    model, batch, _ = tiny_transformer()
    with pytest.raises(InputError, match="takes no input named targets"):
        capture(model, batch)
    with pytest.raises(InputError, match="different batch sizes"):
        capture(model, {"tokens": batch["tokens"], "targets": batch["targets"][:1]})
    with pytest.raises(InputError, match="without dims"):
        capture(model, {"tokens": torch.tensor(1)})


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    model, batch, loss_fn = tiny_transformer(seq=8)
    long = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in batch.items()}
    with pytest.raises(CaptureError, match="position 15 is looked up in a table of 8"):
        capture(model, long, loss_fn=loss_fn)
