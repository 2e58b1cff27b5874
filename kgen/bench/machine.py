"""What a benchmark ran on."""

from __future__ import annotations

import datetime
import platform
import re
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device, commit: str) -> dict[str, Any]:
    """Date, versions and device, in words."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("triton", "cupy"):
        try:
            facts[name] = __import__(name).__version__
        except ImportError:
            facts[name] = "not installed"
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts |= _of_cupy()
    else:
        facts["device"] = "CPU: host executor and Triton interpreter"
    return facts


def _of_cupy() -> dict[str, Any]:
    try:
        told = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        told = ""
    number = re.search(r"\d+\.\d+(\.\d+)?", told)
    driver = number[0] if number else "not told"
    try:
        from cupy_backends.cuda.api import runtime  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        from cupy_backends.cuda.libs import nvrtc
    except ImportError:
        return {"driver": driver}
    version = runtime.driverGetVersion()
    return {
        "driver": f"{driver}, CUDA {version // 1000}.{version % 1000 // 10}",
        "NVRTC": ".".join(map(str, nvrtc.getVersion())),
    }
