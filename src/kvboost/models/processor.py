"""What the CPU says about itself."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

INFO = Path("/proc/cpuinfo")
# Of x86 and of Arm. torch.ops.mkldnn says yes where AVX-512 has to emulate them.
BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}


def cpu_name() -> str:
    """The processor's own name: libraries choose kernels and block sizes by it."""
    return _told("model name") or platform.processor()


def has_bfloat16() -> bool:
    """Whether it multiplies bfloat16 itself; also where that is not known, as on Macs."""
    told = _told("flags") or _told("Features")
    if told:
        return not BFLOAT16.isdisjoint(told.split())
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001


def _told(name: str) -> str:
    """The first line of this name in Linux's description of the CPU."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")
