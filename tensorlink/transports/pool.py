"""Processes of one host, through shared memory: each maps the memory of the other's pool, under the engine's holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tensorlink import _core
from tensorlink.errors import CorruptTransferError
from tensorlink.transports.engine import EngineTransport
from tensorlink.types import PeerId

_KEY_BYTES = 16
_PATH_BYTES = 107


class PoolTransport(EngineTransport):
    """Connects two engines of one host."""

    def address(self) -> bytes:
        site = self.site
        return Address(site.host, site.pid, site.socket_path, site.key.hex()).encode()

    def where(self, address: bytes) -> str:
        return Address.decode(address).path

    def _dial(self, peer: PeerId, address: bytes, timeout: float, stop: _core.Stop | None) -> _core.Connection:
        to = Address.decode(address)
        return self.site.engine.connect(to.path, bytes.fromhex(to.key), peer.name, peer.incarnation, timeout, stop)


@dataclass(frozen=True)
class Address:
    """Where an engine listens. Travels as JSON."""

    host: str
    pid: int
    path: str
    key: str
    """What it wants to see, in hexadecimal."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Raises: CorruptTransferError: these bytes are no address."""
        try:
            fields = json.loads(data)
            address = cls(fields["host"], fields["pid"], fields["path"], fields["key"])
            good = isinstance(address.host, str) and type(address.pid) is int
            good = good and 0 < len(address.path.encode()) <= _PATH_BYTES and "\0" not in address.path
            if good and len(bytes.fromhex(address.key)) == _KEY_BYTES:
                return address
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        raise CorruptTransferError("the address of a peer cannot be read") from None


__all__ = ["Address", "PoolTransport"]
