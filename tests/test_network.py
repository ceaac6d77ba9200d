"""Addresses as text, interfaces, and listeners within a range of ports."""

from __future__ import annotations

import errno
import socket

import pytest

from tensorlink import network
from tensorlink.errors import PeerLostError, TransportError

needs_ipv6 = pytest.mark.skipif("::1" not in network.interfaces().get("lo", []), reason="this host has no IPv6")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host:1", "host", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]:4000", "::1", 4000),
        ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert network.split_address(text) == (host, port)
    assert network.join_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "::1:4000", "[::1]", "[::1:4", "[host]:1", "[]:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        network.split_address(text)


def test_interfaces() -> None:
    known = network.interfaces()
    assert known["lo"][0] == "127.0.0.1" == network.address_of("lo")
    assert set(known) == {name for _, name in socket.if_nameindex()}
    assert network.address_of("127.0.0.2") == "127.0.0.2"
    for name, message in (("nosuch0", "no network interface 'nosuch0'"), ("192.0.2.77", "no address of this host")):
        with pytest.raises(ValueError, match=rf"{message} \(there are .*lo: 127\.0\.0\.1"):
            network.address_of(name)


def test_the_way_to_a_host() -> None:
    assert network.local_address_towards("127.0.0.2", 1, 0) == "127.0.0.1"
    assert network.local_address_towards("localhost", 1, 0) in ("127.0.0.1", "::1")
    with pytest.raises(PeerLostError, match=r"no way leads to nosuch\.invalid:1"):
        network.local_address_towards("nosuch.invalid", 1, 0)


def taken(host: str, count: int) -> tuple[list[socket.socket], str]:
    """Listeners on `count` ports in a row that were free just now, and their range."""
    while True:
        held = [network.listener(host)]
        first = held[0].getsockname()[1]
        try:
            for port in range(first + 1, first + count):
                held.append(network.listener(host, port=port))  # noqa: PERF401 (what was opened must be closed)
            return held, f"{first}-{first + count - 1}"
        except (TransportError, OverflowError):
            for one in held:
                one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_range_of_ports(host: str) -> None:
    held, ports = taken(host, 3)
    with pytest.raises(TransportError, match=f"every port of {ports} is taken on {host}.*wider range") as caught:
        network.listener(host, ports)
    assert caught.value.code == errno.EADDRINUSE
    middle = held[1].getsockname()[1]
    held[1].close()
    with network.listener(host, ports) as one:
        assert one.getsockname()[1] == middle
        assert network.connectable(host, middle, 5) == network.join_address(host, middle)
    with pytest.raises(TransportError, match="Address already in use"):
        network.listener(host, ports, held[0].getsockname()[1])
    for one in held:
        one.close()


def test_failures_of_listeners_say_why() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.77:2000: Cannot assign requested address"):
        network.listener("192.0.2.77", "2000-2001")
    with pytest.raises(TransportError, match=r"cannot listen on nosuch\.invalid:0: "):
        network.listener("nosuch.invalid")


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
def test_a_wildcard_takes_both_families(host: str) -> None:
    with network.listener(host) as one:
        port = one.getsockname()[1]
        assert network.connectable("127.0.0.1", port, 5) == f"127.0.0.1:{port}"
        assert network.connectable("::1", port, 5) == f"[::1]:{port}"
