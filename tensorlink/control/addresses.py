"""Where a peer listens for others, and by which of its addresses it is reached from here.

The address of a peer is a list of gRPC targets with commas between them, the nearest first: its unix socket, and if it
listens for other hosts, `IP:PORT`.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tensorlink import network
from tensorlink.control import runtime_dir
from tensorlink.control.certificates import Certificates
from tensorlink.errors import AuthenticationError, PeerLostError
from tensorlink.settings import Settings

log = logging.getLogger("tensorlink")

MAX_ADDRESS_BYTES = 512


def listen_address(settings: Settings) -> str | None:
    """The IP address on which this peer listens for others; None: on unix sockets only, as there is neither
    a token nor a certificate.

    That of the setting `interface`, else the one from which the coordinator is reached, else loopback. Blocks for the
    look-up of the coordinator's name, up to the setting `timeout` while it is unknown.

    Raises:
        AuthenticationError: `interface` is set, and there is neither.
        ValueError: `interface` isn't here.
        PeerLostError: no way leads to the coordinator.
    """
    if not settings.known_to_others:
        if settings.interface is None:
            return None
        raise AuthenticationError(
            f"to be reached on interface {settings.interface} needs a token or certificates",
            phase="listen",
            hint="Set TENSORLINK_TOKEN, the same for every process of the job, or TENSORLINK_TLS_CERT, _KEY and _CA",
        )
    if settings.interface is not None:
        try:
            found = network.address_of(settings.interface)
        except ValueError as error:
            raise ValueError(f"TENSORLINK_INTERFACE: {error}") from None
        _warn_of_loopback(found, settings)
        return found
    if settings.coordinator is None or settings.coordinator.startswith("unix:"):
        return "127.0.0.1"
    try:
        return network.local_address_towards(*network.split_address(settings.coordinator), settings.timeout)
    except PeerLostError as error:
        raise PeerLostError(
            f"the coordinator cannot be reached: {error.message}",
            phase="join",
            hint="TENSORLINK_COORDINATOR must name it as this host knows it",
        ) from None


def _warn_of_loopback(address: str, settings: Settings) -> None:
    if settings.coordinator is None or settings.coordinator.startswith("unix:"):
        return
    host, _ = network.split_address(settings.coordinator)
    if network.is_loopback(address) and not network.is_loopback(host):
        log.warning(
            "TENSORLINK_INTERFACE=%s is reached from this host alone, and the coordinator is at %s: peers on other "
            "hosts will not find a way here",
            settings.interface,
            settings.coordinator,
        )


def add_tcp_port(server: Any, certificates: Certificates | None, host: str, ports: str | None, port: int = 0) -> int:
    """Makes a gRPC server listen on `host`, by TLS if there are certificates; the port, as `network.listener` chooses it.

    Raises: TransportError: the address or all ports are taken.
    """

    def bind(chosen: int) -> int:
        network.listen(host, chosen).close()  # gRPC says not why it can't, and logs that
        try:
            where = network.join_address(host, chosen)
            if certificates is None:
                return int(server.add_insecure_port(where))
            return int(server.add_secure_port(where, certificates.listener()))
        except RuntimeError:  # somebody took it in between
            raise OSError(errno.EADDRINUSE, "it was taken just now") from None

    return network.in_range(host, ports, port, bind)


@dataclass(frozen=True)
class Route:
    """How a peer is reached from here; `str` of it is for errors."""

    target: str
    """gRPC target; empty: there is none."""
    passed_over: tuple[str, ...] = ()
    """Targets nearer than that, each with the reason why it cannot be used."""

    @property
    def hint(self) -> str | None:
        """What may help where `target` does not answer."""
        if not self.target or self.target.startswith("unix:"):
            return None
        return "If others reach it by another address, set TENSORLINK_INTERFACE where it runs"

    def __str__(self) -> str:
        passed_over = "; ".join(self.passed_over)
        if not self.target:
            return f"{passed_over}, and it listens nowhere else"
        return f"{self.target} ({passed_over})" if passed_over else self.target


def tcp_place(address: str) -> tuple[str, int] | None:
    """Host and port where a peer listens for other hosts; None: it doesn't."""
    for target in address.split(","):
        if not target.startswith("unix:"):
            with contextlib.suppress(ValueError):
                host, port = network.split_address(target)
                return (host, port) if port and network.is_ip(host) else None
    return None


def route_to(address: str) -> Route:
    """The first target of a peer's address that may work from here. Sends nothing, and doesn't block."""
    passed_over: list[str] = []
    for target in address.split(","):
        if target.startswith("unix:"):
            if runtime_dir.answers(Path(unquote(target.removeprefix("unix:")))):
                return Route(target, tuple(passed_over))
            passed_over.append(f"{target}: nobody answers on this socket here")
            continue
        try:
            host, port = network.split_address(target)
        except ValueError:
            host, port = "", 0
        if port and network.is_ip(host):
            return Route(target, tuple(passed_over))
        passed_over.append(f"{target or 'an empty one'}: no address of a peer")
    return Route("", tuple(passed_over))
