"""Labels that the platform gives a process: its zone, its node pool, the slice that shares one NVLink fabric."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tensorlink.topology.sysfs import text

_KUBERNETES = {
    "topology.kubernetes.io/region": "region",
    "topology.kubernetes.io/zone": "zone",
    "topology.kubernetes.io/rack": "rack",
    "nvidia.com/gpu.clique": "slice",
    "karpenter.sh/nodepool": "pool",
    "cloud.google.com/gke-nodepool": "pool",
    "eks.amazonaws.com/nodegroup": "pool",
    "kubernetes.azure.com/agentpool": "pool",
}
_LINE = re.compile(r'([\w./-]{1,253})="([^"\\]{1,63})"')


def platform_labels(root: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Labels `region`, `zone`, `rack`, `slice` and `pool`, as far as the platform tells them.

    Kubernetes tells them where the pod mounts its labels at `/etc/podinfo/labels` (the downward API), Slurm by the
    partition and, with a topology plugin, the switch next to the node, which comes as `switch`.
    """
    found: dict[str, str] = {}
    for line in (text(root / "etc/podinfo/labels") or "").splitlines():
        match = _LINE.fullmatch(line)
        if match and match[1] in _KUBERNETES:
            found.setdefault(_KUBERNETES[match[1]], match[2])
    if env.get("SLURM_JOB_PARTITION"):
        found.setdefault("pool", env["SLURM_JOB_PARTITION"])
    names, kinds = (env.get(f"SLURM_TOPOLOGY_ADDR{end}", "").split(".") for end in ("", "_PATTERN"))
    if len(names) == len(kinds) > 1 and kinds[-2:] == ["switch", "node"] and names[-2]:
        found["switch"] = names[-2]
    return found
