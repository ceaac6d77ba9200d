"""Public figures of wires, bytes per second in one direction. What isn't known here is None, never a guess.

NVLink: the data sheets give the sum of both directions over all links: P100 160 GB/s over 4, V100 300 over 6, A100 600 over
12, H100 and H200 900 over 18, B200 1800 over 18; bridges of GA102 cards (A40, A6000, RTX 3090) 112.5 over 4, of
Turing cards (RTX 2080 Ti, RTX 8000) 100 over 2. XGMI: AMD's data sheets give 92 GB/s a link and both directions for MI50, MI60
and MI100, 100 for MI200, 128 for MI300 and MI325. PCIe: PCI-SIG's rates a lane with what the encoding leaves (8b/10b up to
5 GT/s, 128b/130b up to 32, 242 of 256 bytes of a FLIT at 64). NICs state their rate themselves.
"""

from __future__ import annotations

import re

_GB = 10**9
_NVLINK_BY_MODEL = (  # the first that fits counts
    (r"\b(P100|GP100)\b", 20 * _GB),
    (r"\b(V100\w?|TITAN V|GV100)\b", 25 * _GB),
    (r"\b(A40|RTX A[456]\d00|RTX 3090)\b", 14_062_500_000),
    (r"\b(RTX 20[78]0( Ti| SUPER)?|TITAN RTX|Quadro RTX [568]000)\b", 25 * _GB),
    (r"\b(A100|A800|A30)\b", 25 * _GB),
    (r"\b(H100|H800|H200|H20|GH200)\b", 25 * _GB),
    (r"\b(B100|B200|GB200|B300|GB300)\b", 50 * _GB),
)
_NVLINK_BY_CAPABILITY = {60: 20 * _GB, 70: 25 * _GB, 75: 25 * _GB, 80: 25 * _GB, 86: 14_062_500_000, 90: 25 * _GB}
_NVLINK_BY_CAPABILITY |= {100: 50 * _GB, 103: 50 * _GB}
_XGMI_BY_TARGET = {"906": 46 * _GB, "908": 46 * _GB, "90a": 50 * _GB, "910": 50 * _GB}
_XGMI_BY_TARGET |= {"940": 64 * _GB, "941": 64 * _GB, "942": 64 * _GB}
_PCIE = {2.5: (1, 8 / 10), 5.0: (2, 8 / 10), 8.0: (3, 128 / 130), 16.0: (4, 128 / 130), 32.0: (5, 128 / 130)}
_PCIE |= {64.0: (6, 242 / 256)}
MAX_NIC_MBPS = 3_200_000
"""Twice the fastest port there is: a rate beyond that is an error of who wrote it."""


def nvlink(model: str | None = None, capability: int | None = None) -> int | None:
    """Of one NVLink, by the GPU's model, `NVIDIA H100 80GB HBM3`, or its compute capability, 90."""
    for pattern, rate in _NVLINK_BY_MODEL:
        if model is not None and re.search(pattern, model):
            return rate
    return None if capability is None else _NVLINK_BY_CAPABILITY.get(capability)


def xgmi(target: str | None) -> int | None:
    """Of one XGMI link, by the GPU's target: `gfx942`, or `942` as RCCL writes it (and `910` for `90a`)."""
    return None if target is None else _XGMI_BY_TARGET.get(target.removeprefix("gfx"))


def pcie(speed: str | None, width: str | None) -> tuple[str | None, int | None]:
    """Class and rate of a PCIe link of a speed such as `16.0 GT/s PCIe` and a width: ("PCIe4x16", 31507692307)."""
    match = re.match(r"(\d{1,3}(?:\.\d)?)\s*GT/s", speed or "")
    lanes = int(width) if width and width.isascii() and width.isdecimal() and len(width) < 3 else 0
    known = _PCIE.get(float(match[1])) if match else None
    if known is None or not lanes:
        return None, None
    generation, share = known
    assert match is not None
    return f"PCIe{generation}x{lanes}", int(float(match[1]) * _GB * share * lanes / 8)


def network(mbps: int | None) -> int | None:
    """Of a network port of so many Mbit/s; None for what no port can have."""
    return mbps * 125_000 if mbps is not None and 0 < mbps <= MAX_NIC_MBPS else None
