"""What a machine has and how it hangs together: CPUs, GPUs, NICs, switches, and the links between them.

`discover` looks at this machine, `read` at what was recorded of another one; both give a `Topology`.
"""

from tensorlink.topology.discover import discover
from tensorlink.topology.graph import Bundle, Device, Limits, Link, Topology
from tensorlink.topology.recorded import read

__all__ = ["Bundle", "Device", "Limits", "Link", "Topology", "discover", "read"]
