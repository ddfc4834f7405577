"""``autopar.plan``: defaults, round trips, names that do not matter, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

import autopar
from autopar import Cluster, Plan
from autopar.api.arguments import PlanArguments
from autopar.ir.errors import InputError
from autopar.ir.plan import from_json, to_json
from tests.models import tiny_gpt2, tiny_llama, tiny_transformer

CLUSTER = Cluster("cpu-local", gpus_per_node=4)


def test_two_arguments_are_enough_and_defaults_are_told_once(caplog: pytest.LogCaptureFixture):
    module, _ = tiny_llama()
    with caplog.at_level(logging.INFO, logger="autopar"):
        plan = autopar.plan(module, CLUSTER)
    told = [record.getMessage() for record in caplog.records if record.name == "autopar"]
    assert told == [
        "not given, so chosen: global_batch_size 8, sequences as long as the model takes, "
        "precision fp32; planned for adamw (learning rate 0.0003) and the model's own loss"
    ]
    assert (plan.batch.global_batch_size, plan.model.seq_len) == (8, 16)
    assert (plan.model.name, plan.model.source) == ("LlamaForCausalLM", None)
    assert dataclasses.asdict(plan.training) == {
        "precision": "fp32",
        "gradient_dtype": "fp32",
        "reduce_dtype": "fp32",
        "optimizer": "adamw",
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "max_grad_norm": 1.0,
        "seed": 0,
    }


def test_the_default_batch_has_a_sequence_for_each_gpu():
    plan = autopar.plan(tiny_llama(1)[0], Cluster("a100-80gb", nodes=2), pin={"tp": 2, "pp": 1})
    assert plan.batch.global_batch_size == 16
    assert plan.training.precision == "bf16"


def test_a_module_with_its_loss_is_planned_and_its_plan_reads_back(tmp_path):
    module, inputs, loss_fn = tiny_transformer()
    plan = autopar.plan(
        module,
        CLUSTER,
        example_batch=inputs,
        loss_fn=loss_fn,
        global_batch_size=8,
        pin={"pp": 2, "tp": 2},
    )
    assert plan.pins == {"pp": 2, "tp": 2}
    assert plan.model.num_parameters == sum(p.numel() for p in module.parameters())
    assert set(plan.parameters) == {name for name, _ in module.named_parameters()}
    plan.save(tmp_path / "plan.json")
    assert autopar.read_plan(tmp_path / "plan.json") == plan


def test_a_tied_parameter_is_one_with_two_names():
    plan = autopar.plan(tiny_gpt2()[0], CLUSTER, pin={"pp": 2, "tp": 2})
    assert plan.parameters["transformer.wte.weight"].names == (
        "transformer.wte.weight",
        "lm_head.weight",
    )
    assert plan.parameters["transformer.wte.weight"].stages == (0, 1)


class Renaming:
    """Finds children and parameters under the names that the class's code has for them."""

    def __getattr__(self, name: str) -> Any:
        renamed: dict[str, str] = self.__dict__.get("_renamed", {})
        return super().__getattr__(renamed.get(name, name))  # type: ignore[misc]


def rename(module: nn.Module, prefix: str) -> nn.Module:
    """``module`` with every class, submodule and parameter called otherwise (not list indices)."""
    for number, found in enumerate(list(module.modules())):
        if isinstance(found, nn.ModuleList):
            continue
        names: dict[str, str] = {}
        for table in cast("list[dict[str, Any]]", [found._modules, found._parameters]):
            for index, (name, held) in enumerate(list(table.items())):
                names[name] = f"{prefix}{len(names)}_{index}"
                del table[name]
                table[names[name]] = held
        found.__dict__["_renamed"] = names
        bases = (Renaming, type(found))
        found.__class__ = type(f"{prefix.upper()}{number}", bases, {})
    return module


def without_names(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, but for names, in the order in which parameters are used."""
    document = json.loads(to_json(plan))
    document["model"].pop("name")
    document["certificate"].pop("solve_s")
    document["parameters"] = [
        {key: value for key, value in parameter.items() if key != "names"}
        for parameter in document["parameters"].values()
    ]
    return document


@pytest.mark.parametrize(
    ("name", "pin"), [("llama", {"tp": 4}), ("transformer", {"pp": 2, "tp": 2})]
)
def test_renaming_every_module_and_parameter_gives_the_same_plan(name: str, pin: dict[str, int]):
    plans = []
    for prefix in (None, "zz"):
        loss_fn = None
        if name == "llama":
            module, inputs = tiny_llama()
        else:
            module, inputs, loss_fn = tiny_transformer()
        if prefix is not None:
            rename(module, prefix)
            assert not {"q_proj", "qkv", "weight"} & set(
                ".".join(path for path, _ in module.named_parameters()).split(".")
            )
        plans.append(
            autopar.plan(
                module,
                CLUSTER,
                example_batch=inputs,
                loss_fn=loss_fn,
                global_batch_size=8,
                pin=pin,
            )
        )
    plain, renamed = plans
    assert set(renamed.parameters).isdisjoint(plain.parameters)
    assert without_names(renamed) == without_names(plain)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"global_batch_size": 8.5}, "global_batch_size is 8.5"),
        ({"seq_len": -1}, "seq_len is -1"),
        ({"seq_len": 17}, "longer than the model's 16 positions"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"eps": 0.0}, "eps is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"pin": {"tp": 3}}, "tp=3"),
        ({"pin": {"depth": 1}}, "depth"),
        ({"pin": {"schedule": "gpipe"}}, "schedule='gpipe'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        autopar.plan(tiny_llama(1)[0], CLUSTER, **arguments)


@pytest.mark.parametrize("nodes", [0, -1, 1.5, True])
def test_a_cluster_has_nodes(nodes):
    with pytest.raises(autopar.AutoparError, match="nodes is"):
        Cluster("cpu-local", nodes=nodes)


def test_progress_is_told_and_the_plan_is_json():
    told: list[str] = []
    plan = autopar.plan(
        tiny_llama(1)[0], Cluster("cpu-local", gpus_per_node=1), progress=told.append
    )
    assert told[0] == "capturing LlamaForCausalLM"
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("function", [autopar.plan, autopar.compile])
def test_an_unknown_argument_is_refused_as_python_does(function: Any):
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'batch_size'"):
        function(tiny_llama(1)[0], CLUSTER, batch_size=8)


def test_every_argument_of_a_plan_is_in_the_reference():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
    section = text.partition("## plan\n")[2].partition("\n## ")[0]
    assert [name for name in PlanArguments.__annotations__ if f"`{name}`" not in section] == []
