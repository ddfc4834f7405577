"""Settings of a plan that an edit made impossible are found where the plan is read."""

from __future__ import annotations

import json
import math

import pytest

from autopar.ir.errors import PlanFormatError
from autopar.ir.plan import from_json, to_json
from tests.runtime.cases import Setup, make_plan


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("training", "learning_rate", math.nan),
        ("training", "learning_rate", -1.0),
        ("training", "weight_decay", -0.1),
        ("training", "eps", -1e-8),
        ("training", "betas", [0.9, 1.0]),
        ("training", "max_grad_norm", -1.0),  # would turn every gradient around
        ("training", "max_grad_norm", 0.0),
        ("schedule", "zero_stage", 4),
        ("schedule", "extra_in_flight", -1),
    ],
)
def test_settings_out_of_range_are_refused(section: str, field: str, value: object) -> None:
    document = json.loads(to_json(make_plan(Setup())))
    assert from_json(json.dumps(document), where="here") == make_plan(Setup())
    document[section][field] = value
    with pytest.raises(PlanFormatError, match=f"field {section}.{field}: .* is out of range"):
        from_json(json.dumps(document), where="here")


def test_only_some_schedules_have_more_in_flight() -> None:
    document = json.loads(to_json(make_plan(Setup(schedule="layered"))))
    document["schedule"]["extra_in_flight"] = 1
    with pytest.raises(PlanFormatError, match=r"extra_in_flight: 1 is out of range"):
        from_json(json.dumps(document), where="here")
    document["schedule"]["name"] = "zero_bubble"
    assert from_json(json.dumps(document)).schedule.extra_in_flight == 1
