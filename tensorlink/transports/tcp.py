"""Between hosts, with nothing but IP: one-sided reads and a lane over TCP streams, served by the owner's engine."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass

from tensorlink import _core, network
from tensorlink.errors import AuthenticationError, CorruptTransferError
from tensorlink.transports.base import Site
from tensorlink.transports.engine import EngineTransport
from tensorlink.types import Link, PeerId

_KEY_BYTES = 16
_HINT = "Every process of a job needs TENSORLINK_TLS_CERT, _KEY and _CA, or none of them"


class TcpTransport(EngineTransport):
    """Listens only where the site allows it: a listener for other hosts needs a token or certificates."""

    name = "tcp"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._port = 0
        if site.listen is not None:
            first, _, last = (site.ports or "0").partition("-")
            self._port = site.engine.listen(site.listen, int(first), int(last or first))

    def links(self) -> tuple[Link, ...]:
        why = None
        if self.site.listen is None:
            why = "it listens for other hosts, which needs a token or certificates: set TENSORLINK_TOKEN"
        return (Link(self.name, bytes_per_s=3e9, latency_s=30e-6, reach="network", unavailable=why),)

    def address(self) -> bytes:
        return TcpAddress(self.site.listen or "", self._port, self.site.key.hex(), self.site.engine.secured).encode()

    def where(self, address: bytes) -> str:
        to = TcpAddress.decode(address)
        return network.join_address(to.host, to.port)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        for address in (local, remote):
            TcpAddress.decode(address)
        return None

    def _dial(self, peer: PeerId, address: bytes, timeout: float, stop: _core.Stop | None) -> _core.Connection:
        to = TcpAddress.decode(address)
        if to.tls != self.site.engine.secured:
            who, lacks = (
                (peer.name, "this process has no certificates") if to.tls else ("this process", f"{peer.name} has none")
            )
            raise AuthenticationError(f"{who} takes nothing but TLS, and {lacks}", hint=_HINT)
        try:
            key = bytes.fromhex(to.key)
            return self.site.engine.dial(to.host, to.port, key, peer.name, peer.incarnation, timeout, stop)
        except AuthenticationError as error:
            if "certificate" in error.message or "TLS" in error.message:
                error.hint = _HINT
            raise


@dataclass(frozen=True)
class TcpAddress:
    """Where an engine listens for other hosts. Travels as JSON."""

    host: str
    """A numeric IP address."""
    port: int
    key: str
    """What it wants to be shown knowledge of, in hexadecimal."""
    tls: bool = False
    """Whether it takes nothing but TLS."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> TcpAddress:
        """Raises: CorruptTransferError: these bytes are no address."""
        try:
            fields = json.loads(data)
            address = cls(fields["host"], fields["port"], fields["key"], fields.get("tls") is True)
            good = isinstance(address.host, str) and type(address.port) is int and 0 < address.port < 1 << 16
            ipaddress.ip_address(address.host)
            # The zone of an IPv6 address may hold anything.
            if good and address.host.isprintable() and len(bytes.fromhex(address.key)) == _KEY_BYTES:
                return address
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        raise CorruptTransferError("the address of a peer cannot be read") from None
