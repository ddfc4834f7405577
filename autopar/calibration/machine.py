"""What a machine is and has: its name, its hardware file to start from, free memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from autopar.ir.errors import ClusterError

_KNOWN_GPUS = (("H100", "h100-80gb"), ("H200", "h100-80gb"), ("A100", "a100-80gb"))


def device_type() -> str:
    """Type of the device that ranks compute on."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def default_hardware() -> str:
    """The known hardware that is most like this machine's.

    Raises:
        ClusterError: Nothing is like it.
    """
    if device_type() == "cpu":
        return "cpu-local"
    name = device_name()
    for part, hardware in _KNOWN_GPUS:
        if part in name:
            is_small = "40GB" in name and hardware == "a100-80gb"
            return "a100-40gb" if is_small else hardware
    raise ClusterError(
        f"no hardware file is like {name}",
        hint="--hardware with the file of the nearest kind, whose datasheet numbers you have set",
    )


def device_name() -> str:
    """What the device calls itself."""
    if device_type() == "cuda":
        return torch.cuda.get_device_name()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def num_sms() -> int | None:
    """Multiprocessors, where the device has some."""
    if device_type() != "cuda":
        return None
    return int(torch.cuda.get_device_properties().multi_processor_count)


def device_memory() -> tuple[int, int]:
    """Bytes in all, and those taken by anything but tensors, of this process's accelerator."""
    free, total = torch.accelerator.get_memory_info()
    return total, max(0, total - free - torch.accelerator.memory_reserved())


def host_memory() -> int:
    """Bytes of main memory that processes may still take, within this container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
