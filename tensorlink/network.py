"""Addresses as text, what this host is called in its networks, and listeners within a range of ports."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tensorlink.errors import PeerLostError, TransportError

T = TypeVar("T")

_SIOCGIFCONF = 0x8912
_SIOCGIFMTU = 0x8921
_IFREQ = struct.Struct("16sHH4s16x")  # name, family, port, IPv4 address
_IFREQ_MTU = struct.Struct("16si20x")
_UNUSABLE = 0x40 | 0x08  # IFA_F_TENTATIVE, IFA_F_DADFAILED
_RETRY_S = 0.5
_TRY_S = 2.0


# Text


def split_address(text: str) -> tuple[str, int]:
    """Host, without brackets, and port of `HOST:PORT` or `[IPV6]:PORT`. Raises: ValueError: it is neither."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    # IPv6 without brackets would be taken apart in the wrong place, so brackets and colons come together.
    well_formed = host == f"[{bare}]" if ":" in bare else host == bare
    if not (bare and well_formed and re.fullmatch("[0-9]{1,5}", port) and int(port) < 1 << 16):
        raise ValueError(f"an address is HOST:PORT, or [HOST]:PORT for IPv6, not {text!r}")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip(host: str) -> bool:
    """Whether this is an IP address, v4 or v6 with or without a scope (`fe80::1%eth0`), and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether this is an address that stands for all of a host's."""
    return is_ip(host) and ipaddress.ip_address(host).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether it is an address, or the name, by which a host reaches only itself."""
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def port_range(ports: str | None) -> range:
    """The ports that `FIRST-LAST` names; None: only 0, which stands for any free one. Raises: ValueError."""
    if ports is None:
        return range(1)
    match = re.fullmatch("([0-9]{1,5})-([0-9]{1,5})", ports)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise ValueError(f"ports must be a range such as 20000-20100, not {ports!r}")
    return range(first, last + 1)


# This host


def interfaces() -> dict[str, list[str]]:
    """The IP addresses of each network interface, those first that more of the others can reach: global before
    link-local, which carry their scope, and IPv4 before IPv6. Doesn't block."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in [*_ipv4(), *_ipv6()]:
        found.setdefault(name, []).append(address)
    for addresses in found.values():
        addresses.sort(key=_rank)
    return found


def _rank(address: str) -> tuple[bool, int]:
    parsed = ipaddress.ip_address(address)
    return parsed.is_link_local, parsed.version


def speed_towards(host: str, root: Path = Path("/sys/class/net")) -> float | None:
    """Bytes a second of the interface by which packets leave for an IP address; None: it tells none, as virtual ones often do."""
    try:
        local = _towards(host, 1)
        name = next(name for name, addresses in interfaces().items() if local in addresses)
        mbps = int((root / name / "speed").read_text())  # sysfs-class-net: in Mbit/s, -1 where it is unknown
    except (OSError, ValueError, StopIteration):
        return None
    return mbps * 1e6 / 8 if mbps > 0 else None


def _ipv4() -> list[tuple[str, str]]:
    """netdevice(7), SIOCGIFCONF: interface and address, one each."""
    room = array.array("B", bytes(64 << 10))
    address, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, address))
    used = struct.unpack("iP", answer)[0]
    rows = _IFREQ.iter_unpack(room.tobytes()[:used])
    # An alias such as eth0:1 is an address of eth0.
    return [
        (name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(packed))
        for name, family, _, packed in rows
        if family == socket.AF_INET
    ]


def _ipv6() -> list[tuple[str, str]]:
    """proc(5), /proc/net/if_inet6; no such file: no IPv6."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    found = []
    for digits, _, _, _, flags, name in map(str.split, lines):
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not int(flags, 16) & _UNUSABLE:
            found.append((name, f"{address}%{name}" if address.is_link_local else str(address)))
    return found


def address_of(interface: str) -> str:
    """The IP address that an interface name, or an IP address of this host, stands for.

    Raises: ValueError: there is no such interface or address here, or it has none; the message lists what there is.
    """
    known = interfaces()
    if is_ip(interface):
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(socket.getaddrinfo(interface, 0, family, socket.SOCK_DGRAM)[0][4])
            return interface
        except OSError:
            why = f"{interface} is no address of this host"
    elif interface not in known:
        why = f"this host has no network interface {interface!r}"
    elif known[interface]:
        return known[interface][0]
    else:
        why = f"the network interface {interface!r} has no IP address"
    rows = "; ".join(f"{name}: {', '.join(addresses) or 'no address'}" for name, addresses in known.items())
    raise ValueError(f"{why} (there are {rows})")


def mtu_of(host: str | None) -> int | None:
    """The MTU, in bytes, of the interface that has this IP address; None where there is none. Doesn't block."""
    name = next((name for name, addresses in interfaces().items() if host in addresses), None)
    if name is None:
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # netdevice(7), SIOCGIFMTU
            answer = fcntl.ioctl(probe, _SIOCGIFMTU, _IFREQ_MTU.pack(name.encode(), 0))
    except OSError:
        return None
    return int(_IFREQ_MTU.unpack(answer)[1])


def local_address_towards(host: str, port: int, timeout: float) -> str:
    """The IP address of this host from which its packets leave for `host`, an address or a name. Sends nothing there.

    Blocks for the look-up of a name, and up to `timeout` seconds for one that isn't known yet.

    Raises: PeerLostError: the name stays unknown, or no route leads there.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _towards(host, port)
        except OSError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLostError(f"no way leads to {join_address(host, port)}: {error.strerror}") from None
            time.sleep(min(_RETRY_S, left))


def _towards(host: str, port: int) -> str:
    failed: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return _host_of(probe.getsockname())
        except OSError as error:
            failed = error
    raise failed or OSError(errno.EADDRNOTAVAIL, "it has no address")


# Listeners and connections


def ip_of(host: str) -> str:
    """The first IP address of a name; an address is its own. Blocks for the look-up. Raises: OSError."""
    return host if is_ip(host) else _host_of(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4])


def listener(host: str, ports: str | None = None, port: int = 0) -> socket.socket:
    """A TCP socket that listens on `host`, at `port`, or if that is 0, at the first free port of the range `ports`.

    A wildcard takes IPv4 and IPv6 alike. The caller owns it. Raises: TransportError: the address or all ports are taken.
    """
    return in_range(host, ports, port, lambda chosen: listen(host, chosen))


def in_range(host: str, ports: str | None, port: int, bind: Callable[[int], T]) -> T:
    """What `bind` returns for `port`, or if that is 0, for the first port of the range `ports` that it can take.

    `bind` raises OSError where it cannot. Raises: TransportError: any failure, and that all ports are taken.
    """
    for candidate in (port,) if port else port_range(ports):
        try:
            return bind(candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port or not ports:
                where = join_address(host, candidate)
                code = error.errno or 0
                why = os.strerror(code) if code > 0 else error.strerror  # those of a look-up are below 0
                raise TransportError(f"cannot listen on {where}: {why}", code=error.errno, phase="listen") from None
    raise TransportError(
        f"every port of {ports} is taken on {host}",
        code=errno.EADDRINUSE,
        phase="listen",
        hint="Give TENSORLINK_PORTS a wider range: each process needs several",
    )


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens there, as `listener`. Raises: OSError."""
    dual = is_wildcard(host) and socket.has_dualstack_ipv6()
    family, _, _, _, address = socket.getaddrinfo("::" if dual else host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=256, dualstack_ipv6=dual)


def connectable(host: str, port: int, timeout: float) -> str:
    """`HOST:PORT` with the first IP address of `host`, an address or a name, at which a connection succeeds just now.

    Whoever asks tries the addresses of a name in the same order, so that all meet at one where several answer. Blocks up to
    `timeout` seconds for the look-up and all of them, two for each but the last. Raises: OSError: none answers.
    """
    deadline = time.monotonic() + timeout
    found = look_up(host, port, timeout)
    failed: OSError | None = None
    for number, (family, address) in enumerate(found, 1):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(left if number == len(found) else min(left, _TRY_S))
                probe.connect(address)
            return join_address(_host_of(address), port)
        except OSError as error:
            failed = error
    raise failed or OSError(errno.EADDRNOTAVAIL, "it has no address")


def look_up(host: str, port: int, timeout: float) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """What the name stands for just now, in an order that depends on nothing but the addresses. Blocks up to `timeout`
    seconds; a resolver that is still silent then goes on for as long as it likes, on a thread of its own. Raises: OSError.
    """
    answer: Future[list[Any]] = Future()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error if isinstance(error, OSError) else OSError(errno.EINVAL, f"no name: {error}"))

    threading.Thread(target=ask, name="tensorlink-look-up", daemon=True).start()
    try:
        rows = answer.result(timeout)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"the look-up of {host} took longer than {timeout:g} s") from None
    found = {(family, address) for family, _, _, _, address in rows}
    return sorted(found, key=lambda row: (_rank(row[1][0]), ipaddress.ip_address(row[1][0]).packed, row[1]))


async def refuses(host: str, port: int, timeout: float = 2.0) -> bool:
    """Whether that host says that nobody listens there. False: somebody does, or nothing is heard."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return False


def _host_of(found: tuple[Any, ...]) -> str:
    """The IP address of a socket address, with the scope that Python leaves out of its text."""
    scope = found[3] if len(found) == 4 else 0
    return f"{found[0]}%{socket.if_indextoname(scope)}" if scope else str(found[0])
