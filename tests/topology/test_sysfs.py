"""A machine by its `/sys` and `/proc`, made in a folder; and this one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorlink.topology import Limits, discover, nvml, sysfs
from tensorlink.topology.labels import platform_labels
from tensorlink.topology.text import Warnings

UP, DOWN = "0000:10:00.0", ("0000:11:00.0", "0000:11:01.0")


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text + "\n")


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))


def pci(root: Path, where: str, pci_class: str, speed: str = "32.0 GT/s PCIe", vendor: str = "0x10de") -> Path:
    folder = root / "sys/devices" / where
    facts = {"max_link_speed": speed, "current_link_speed": "2.5 GT/s PCIe", "current_link_width": "16"}
    write(folder, **{"class": pci_class}, vendor=vendor, numa_node="0" if "pci0000:00" in where else "1", **facts)
    link(root / "sys/bus/pci/devices" / folder.name, folder)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sockets: a switch with a GPU and an RDMA NIC at the first, a GPU and an Ethernet port at the second."""
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        write(
            tmp_path / f"sys/devices/system/node/node{node}", cpulist=cpus, meminfo=f"Node {node} MemTotal:  1048576 kB"
        )
    switch = f"pci0000:00/0000:00:01.0/{UP}"
    for where in ("pci0000:00/0000:00:01.0", switch, *(f"{switch}/{port}" for port in DOWN)):
        pci(tmp_path, where, "0x060400")
    pci(tmp_path, f"{switch}/{DOWN[0]}/0000:12:00.0", "0x030200")
    nic = pci(tmp_path, f"{switch}/{DOWN[1]}/0000:13:00.0", "0x020700", speed="16.0 GT/s PCIe", vendor="0x15b3")
    pci(tmp_path, "pci0000:80/0000:80:01.0", "0x060400")
    pci(tmp_path, "pci0000:80/0000:80:01.0/0000:81:00.0", "0x030000")
    pci(tmp_path, "pci0000:80/0000:80:02.0", "0x030000", vendor="0x1a03")  # the console's
    port = pci(tmp_path, "pci0000:80/0000:80:03.0", "0x020000", vendor="0x8086")
    write(nic / "infiniband/mlx5_0/ports/1", rate="400 Gb/sec (4X NDR)", state="4: ACTIVE")
    write(nic / "infiniband/mlx5_0/ports/2", rate="400 Gb/sec (4X NDR)", state="1: DOWN")
    link(tmp_path / "sys/class/infiniband/mlx5_0", nic / "infiniband/mlx5_0")
    virtual = tmp_path / "sys/devices/virtual"
    for parent, name, speed, kind in (
        (nic, "ib0", "-1", "32"),
        (port, "eno1", "25000", "1"),
        (virtual, "lo", "", "772"),
    ):
        write(parent / "net" / name, type=kind, speed=speed)
        link(tmp_path / "sys/class/net" / name, parent / "net" / name)
    write(virtual / "net/veth1", type="1", speed="10000")
    link(tmp_path / "sys/class/net/veth1", virtual / "net/veth1")
    write(tmp_path / "proc/self", status="Cpus_allowed_list:\t0-5", cgroup="0::/job")
    write(tmp_path / "sys/fs/cgroup/job", **{"cpu.max": "250000 100000", "memory.max": "1073741824"})
    return tmp_path


def test_machine(root: Path) -> None:
    found = discover(root, labels={"rack": "7"})
    assert [device.name for device in found.devices] == ["CPU0", "CPU1", "GPU0", "GPU1", "mlx5_0", "eno1", "SWITCH0"]
    nic = found.device("mlx5_0")
    assert (nic.interfaces, nic.bytes_per_s, nic.numa_node, nic.labels) == (("ib0",), 50 * 10**9, 0, {"rack": "7"})
    assert (found.device("eno1").bytes_per_s, found.device("GPU0").pcie) == (3_125_000_000, "PCIe5x16")
    said = {(link.a, link.b): (link.link_class, link.bytes_per_s) for link in found.links}
    assert said["GPU0", "mlx5_0"] == ("PIX", 31_507_692_307)  # PCIe 4, which is the narrower of the two
    assert said["GPU1", "eno1"] == ("PHB", 63_015_384_615) and said["GPU0", "GPU1"] == ("SYS", None)
    assert said["SWITCH0", "GPU0"] == ("PCIe5x16", 63_015_384_615) and said["CPU0", "CPU1"] == ("SYS", None)
    assert [nic.name for nic in found.nearest("GPU0")] == ["mlx5_0"] and found.device("0000:81:00.0").name == "GPU1"
    assert found.limits == Limits(cpus=2.5, cpuset="0-5", memory_bytes=2**30)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    (cpu,) = discover(tmp_path, labels={}).devices
    assert (cpu.name, cpu.numa_node, cpu.memory_bytes) == ("CPU0", None, None)


def test_nodes_of_memory_alone_are_no_cpus(tmp_path: Path) -> None:
    for node in range(9):
        facts = {"cpulist": "0-71"} if node == 0 else {"cpulist": ""}
        write(tmp_path / f"sys/devices/system/node/node{node}", meminfo=f"Node {node} MemTotal: 1048576 kB", **facts)
    (cpu,) = discover(tmp_path, labels={}).of_kind("cpu")
    assert (cpu.name, cpu.cpu_affinity) == ("CPU0", "0-71")


def test_a_container_has_its_virtual_interface(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/virtual/net/eth0", type="1", speed="10000")
    link(tmp_path / "sys/class/net/eth0", tmp_path / "sys/devices/virtual/net/eth0")
    (nic,) = sysfs.nics(tmp_path, {})
    assert (nic.name, nic.virtual, nic.bytes_per_s) == ("eth0", True, None)


def test_labels_of_the_platform(tmp_path: Path) -> None:
    write(tmp_path / "etc/podinfo", labels='app="x"\ntopology.kubernetes.io/zone="eu-1a"')
    slurm = {
        "SLURM_JOB_PARTITION": "h100",
        "SLURM_TOPOLOGY_ADDR": "s0.s3.n7",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    assert platform_labels(tmp_path, slurm) == {"zone": "eu-1a", "pool": "h100", "switch": "s3"}


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_LABELS", "rack=7")
    found = discover()
    assert found.of_kind("cpu") and found.source == "this machine" and found.labels["rack"] == "7"
    assert sum(cpu.memory_bytes or 0 for cpu in found.of_kind("cpu")) > 0
    assert all(device.labels["rack"] == "7" for device in found.devices)
    json.dumps(found.to_json())


class NoAnswerError(Exception):
    """What NVML's functions raise."""


def library() -> SimpleNamespace:
    """What two GPUs with 18 NVLinks each to one NVSwitch would answer; there is no such machine to ask here."""

    def unknown(*_: object) -> object:
        raise NoAnswerError

    return SimpleNamespace(
        NVMLError=NoAnswerError,
        NVML_NVLINK_DEVICE_TYPE_GPU=0,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_NVLINK_MAX_LINKS=36,
        NVML_FEATURE_ENABLED=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:1{handle}:00.0".upper()),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=141 << 30),
        nvmlDeviceGetNumaNodeId=unknown,
        nvmlDeviceGetNvLinkState=lambda handle, link: int(link < 18),
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=b"00000000:A0:00.0"),
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2,
    )


def test_nvml() -> None:
    warnings = Warnings()
    one, other = nvml.gpus(warnings, library())
    assert (one.device.pci, one.device.model, other.device.uuid) == ("0000:10:00.0", "NVIDIA H200", "GPU-1")
    assert one.nvlinks == {("switch", "0000:a0:00.0"): 18} and one.rate == 25 * 10**9 and warnings.all() == ()
    assert one.device.bundle is not None and one.device.bundle.total == 18 and one.device.gpu_numa_id is None


def test_nvml_without_a_driver() -> None:
    broken = library()
    broken.nvmlInit = broken.nvmlDeviceGetNumaNodeId
    assert nvml.gpus(Warnings(), broken) == []
