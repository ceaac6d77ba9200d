"""Direct tensor transport between processes and devices: handles over gRPC, bytes over the fastest path.

import tensorlink as tl

tl.init("trainer")
tl.send({"weights": tensor}, "worker")
"""

try:
    from tensorlink import _core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the compiled core of tensorlink is not in {__path__[0]} ({error}); if that is a checkout, run `pip install -e .` "
        "in it, or leave that folder so that Python finds the installed package"
    ) from error

from tensorlink.api import (
    current,
    drain,
    empty,
    explain,
    get,
    iget,
    init,
    irecv,
    isend,
    on,
    peers,
    put,
    recv,
    send,
    shutdown,
    stats,
    topology,
    wait,
)
from tensorlink.endpoint import Endpoint
from tensorlink.errors import (
    AuthenticationError,
    ClosedError,
    CorruptTransferError,
    LayoutMismatchError,
    NameInUseError,
    NoPathError,
    PeerLostError,
    PeerRestartedError,
    PeerUnknownError,
    PoolExhaustedError,
    StaleRefError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.paths import PathReport
from tensorlink.settings import Settings
from tensorlink.topology import Topology
from tensorlink.transfer import Transfer
from tensorlink.types import PeerId, PeerInfo, TensorRef
from tensorlink.version import RELEASE
from tensorlink.weights import WeightPublisher, WeightSubscriber

__version__ = RELEASE

__all__ = [
    "AuthenticationError",
    "ClosedError",
    "CorruptTransferError",
    "Endpoint",
    "LayoutMismatchError",
    "NameInUseError",
    "NoPathError",
    "PathReport",
    "PeerId",
    "PeerInfo",
    "PeerLostError",
    "PeerRestartedError",
    "PeerUnknownError",
    "PoolExhaustedError",
    "Settings",
    "StaleRefError",
    "TensorLinkError",
    "TensorRef",
    "Topology",
    "Transfer",
    "TransferCancelledError",
    "TransferTimeoutError",
    "TransportError",
    "WeightPublisher",
    "WeightSubscriber",
    "current",
    "drain",
    "empty",
    "explain",
    "get",
    "iget",
    "init",
    "irecv",
    "isend",
    "on",
    "peers",
    "put",
    "recv",
    "send",
    "shutdown",
    "stats",
    "topology",
    "wait",
]
