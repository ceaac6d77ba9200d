"""Each recorded machine against what is known of it, by what `tensorlink topo --json` prints."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tensorlink.topology import Topology, read
from tests.topology.cases import CASES, expected, names


def plain(found: Topology) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(found.to_json()))
    return loaded


def classes(found: dict[str, Any]) -> dict[tuple[str, str], str]:
    stated = {(link["a"], link["b"]): link["class"] for link in found["links"]}
    return {**{(b, a): link_class for (a, b), link_class in stated.items()}, **stated}


@pytest.mark.parametrize("name", names("topo", "*.txt"))
def test_table(name: str) -> None:
    facts = expected("topo", name)
    found = read((CASES / "topo" / f"{name}.txt").read_bytes())
    said = plain(found)
    devices = {device["name"]: device for device in said["devices"]}
    between = classes(said)
    nics = [device["name"] for device in said["devices"] if device["kind"] == "nic"]
    assert sum(device["kind"] == "gpu" for device in said["devices"]) == facts["num_gpus"]
    assert len(nics) == facts["num_nics"] and nics == facts.get("nics", nics)
    for nic, device in facts.get("nic_devices", {}).items():
        assert devices[nic]["device"] == device
    for a, row in facts.get("gpu_matrix", {}).items():
        assert {b: "X" if a == b else between[a, b] for b in row} == row
    for a, b, link_class in facts["pairs"]:
        assert between[a, b] == (link_class["type"] if isinstance(link_class, dict) else link_class)
    for gpu, near in facts.get("closest_nics", {}).items():
        assert [(nic.name, nic.device) for nic in found.nearest(gpu)] == list(
            zip(near["nics"], near["devices"], strict=True)
        )
        assert {between[gpu, nic] for nic in near["nics"]} == {near["class"]}
    for fact in ("numa_affinity", "cpu_affinity", "gpu_numa_id", "numa_node"):
        for gpu, value in facts.get(fact, {}).items():
            assert (gpu, fact, devices[gpu][fact]) == (gpu, fact, value)
    for fact in ("hops", "weight"):
        for a, row in facts.get(fact, {}).items():
            links = {b: found.between(a, b) for b in row if b != a}
            assert {b: getattr(link, fact) for b, link in links.items()} == {b: row[b] for b in links}


@pytest.mark.parametrize("name", names("nccl", "*.xml"))
def test_nccl(name: str) -> None:
    facts = expected("nccl", name)
    found = read((CASES / "nccl" / f"{name}.xml").read_bytes())
    gpus, nics = found.of_kind("gpu"), found.of_kind("nic")
    assert [cpu.numa_node for cpu in found.of_kind("cpu")] == facts["numa_nodes"]
    assert len(gpus) == (facts["num_gpu_elements"] or facts["num_gpu_pci_leaves"])
    assert len(nics) == (facts["num_net_elements"] or facts["num_nic_pci_leaves"])
    assert len({nic.pci for nic in nics} - {None}) == facts["num_nic_pci_leaves"]
    bundles = {gpu.name.removeprefix("GPU"): gpu.bundle for gpu in gpus if gpu.bundle}
    assert {name: (one.kind, one.total, dict(one.by_target)) for name, one in bundles.items()} == {
        name: (one["kind"], one["total"], one["by_target"]) for name, one in facts["links_per_gpu"].items()
    }
    for gpu in facts["gpus"]:
        device = found.device(f"GPU{gpu['dev']}")
        assert (device.pci, device.numa_node) == (gpu["busid"], gpu["numa"])
    assert Counter((nic.device, nic.speed_mbps, nic.numa_node, nic.pci) for nic in nics if nic.speed_mbps) == Counter(
        (net["name"], net["speed_mbps"], net["numa"], net["busid"]) for net in facts["nets"]
    )
    for shared in facts["gpu_net_shared_switch"]:
        assert [nic.name for nic in found.nearest(f"GPU{shared['gpu_dev']}")] == shared["nets_behind_same_switch"]
    for leaf in facts["leaf_switches"]:
        below = {found.device(other).pci for other in found.links_of(leaf["switch"])}
        assert below >= {*leaf["gpus"], *leaf["nics"]}
