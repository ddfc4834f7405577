"""Hardware files that are written are read back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from autopar.calibration.document import check_output, render, write_document
from autopar.calibration.hardware import value_at, with_values
from autopar.ir.errors import InputError
from autopar.solver.hardware import Cluster, known_hardware, read_hardware

WHEN = 'today, 3 ranks of "a machine"'


def text_of(name: str, changes: dict[str, float], document: dict[str, Any] | None = None) -> str:
    hardware, text = read_hardware(name)
    return render(
        tomllib.loads(text.decode()) if document is None else document,
        with_values(hardware, changes),
        dict.fromkeys(changes, "measurement: this"),
        base_name=name,
        gpus_per_node=3,
        when=WHEN,
        heading="measured",
    )


@pytest.mark.parametrize("name", known_hardware())
def test_a_written_file_is_read_back(name: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    changes = {"chip.launch_s": 3.25e-6, "efficiency.hbm": 0.123456, "chip.peak_flops.fp32": 7e11}
    write_document(path, text_of(name, changes))
    base, found = Cluster(name), Cluster(path, nodes=2)
    assert (found.name, found.gpus_per_node, found.device) == ("mine", 3, base.device)
    assert found.hardware.efficiency.hbm == 0.1235
    for source in base.hardware.sources:
        value = changes.get(source, value_at(base.hardware, source))
        assert value_at(found.hardware, source) == pytest.approx(value, 1e-3)
        said = found.hardware.sources[source]
        if source in changes:
            assert said == f"measurement: this; {WHEN}"
        else:
            assert said.startswith(f"not measured here, from {name}: ")
            assert said.endswith(base.hardware.sources[source])


def test_fields_that_are_not_known_are_copied():
    document = tomllib.loads(read_hardware("cpu-local")[1].decode())
    document["chip"]["speed_of_light"] = {"value": 3, "source": "nature"}
    document["color"] = "red"
    found = tomllib.loads(text_of("cpu-local", {}, document))
    assert found["color"] == "red"
    assert found["chip"]["speed_of_light"]["value"] == 3
    assert found["chip"]["speed_of_light"]["source"].endswith("nature")


@pytest.mark.parametrize("name", ["mine", "missing/mine.toml", "mine.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(name: str, tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot write the hardware file|ends in \.toml"):
        check_output(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_checking_keeps_a_file_that_exists(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("old")
    check_output(path)
    assert path.read_text() == "old"
