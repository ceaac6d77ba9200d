"""GPUs as NVIDIA's management library tells of them, through `nvidia-ml-py`, which is optional."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorlink.topology import pci, rates
from tensorlink.topology.graph import Bundle, Device
from tensorlink.topology.text import Warnings

_SWITCH, _GPU = "switch", "gpu"


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU, and its active NVLinks by what is at their other end: a kind and, if it is known, a PCI address."""

    device: Device
    nvlinks: Counter[tuple[str, str | None]]
    rate: int | None
    """Of one NVLink."""


def gpus(warnings: Warnings, library: Any = None) -> list[NvmlGpu]:
    """All GPUs that the library shows to this process, in its order; none where it isn't installed or has no driver.

    Blocks for the driver's answer. `library` is a module like `pynvml`; None: that one, if it is installed.
    """
    if library is None:
        try:
            import pynvml
        except ModuleNotFoundError:
            return []
        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError:  # no driver here
        return []
    try:
        return [_gpu(index, library) for index in range(library.nvmlDeviceGetCount())]
    except library.NVMLError as error:
        warnings.add(f"NVML gave up: {error}")
        return []
    finally:
        library.nvmlShutdown()


def _gpu(index: int, library: Any) -> NvmlGpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    ask = _asker(library, handle)
    model = _plain(ask("nvmlDeviceGetName"))
    info, memory = ask("nvmlDeviceGetPciInfo"), ask("nvmlDeviceGetMemoryInfo")
    node = ask("nvmlDeviceGetNumaNodeId")
    major, minor = ask("nvmlDeviceGetCudaComputeCapability") or (None, None)
    links = _nvlinks(library, ask)
    capability = major * 10 + minor if major is not None else None
    device = Device(
        name=f"GPU{index}",
        kind="gpu",
        uuid=_plain(ask("nvmlDeviceGetUUID")),
        model=model,
        pci=pci.address(_plain(info.busId)) if info is not None else None,
        memory_bytes=memory.total if memory is not None else None,
        gpu_numa_id=node if node is not None and 0 <= node < 1 << 16 else None,
        bundle=_bundle(links),
        labels=_fabric_label(library, handle),
    )
    return NvmlGpu(device, links, rates.nvlink(model, capability))


def _asker(library: Any, handle: Any) -> Callable[..., Any]:
    def ask(name: str, *arguments: Any) -> Any:
        """What a function says; None where the library, the driver or the GPU doesn't know it."""
        try:
            return getattr(library, name)(handle, *arguments)
        except (AttributeError, library.NVMLError):
            return None

    return ask


def _plain(said: str | bytes | None) -> str | None:
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def _nvlinks(library: Any, ask: Callable[..., Any]) -> Counter[tuple[str, str | None]]:
    kinds = {library.NVML_NVLINK_DEVICE_TYPE_GPU: _GPU, library.NVML_NVLINK_DEVICE_TYPE_SWITCH: _SWITCH}
    found: Counter[tuple[str, str | None]] = Counter()
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        if ask("nvmlDeviceGetNvLinkState", link) != library.NVML_FEATURE_ENABLED:
            continue
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
        kind = kinds.get(ask("nvmlDeviceGetNvLinkRemoteDeviceType", link), "")
        address = pci.address(_plain(remote.busId)) if remote is not None else None
        found[kind, address if address and not address.startswith("ffff") else None] += 1
    return found


def _bundle(links: Counter[tuple[str, str | None]]) -> Bundle | None:
    targets: Counter[str] = Counter()
    for (_, address), count in links.items():
        if address is not None:
            targets[address] += count
    return Bundle(kind="nvlink", total=links.total(), by_target=dict(targets)) if links else None


def _fabric_label(library: Any, handle: Any) -> dict[str, str]:
    """`slice`: which GPUs of which hosts share one NVLink fabric, as the cluster's id and the clique's number."""
    try:
        info = library.c_nvmlGpuFabricInfo_v2_t()
        library.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        cluster = bytes(info.clusterUuid).hex()
        if info.state != library.NVML_GPU_FABRIC_STATE_COMPLETED or not cluster.strip("0"):
            return {}
    except (AttributeError, library.NVMLError):
        return {}
    return {"slice": f"{cluster}.{info.cliqueId}"}
