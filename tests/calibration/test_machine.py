"""Which hardware a machine starts from, and what memory it has."""

from __future__ import annotations

import pytest
import torch

from autopar.calibration import machine
from autopar.ir.errors import ClusterError


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
    ],
)
def test_a_gpu_starts_from_the_file_of_its_kind(name: str, hardware: str, monkeypatch):
    monkeypatch.setattr(machine, "device_type", lambda: "cuda")
    monkeypatch.setattr(machine, "device_name", lambda: name)
    assert machine.default_hardware() == hardware


def test_a_gpu_of_no_kind_is_asked_for_one(monkeypatch):
    monkeypatch.setattr(machine, "device_type", lambda: "cuda")
    monkeypatch.setattr(machine, "device_name", lambda: "Tesla K80")
    with pytest.raises(ClusterError, match=r"like Tesla K80[\s\S]*--hardware"):
        machine.default_hardware()


def test_what_is_taken_of_a_device_is_not_what_tensors_take(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (60, 100))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 25)
    assert machine.device_memory() == (100, 15)


def test_there_is_memory_here():
    assert machine.host_memory() > 2**20
