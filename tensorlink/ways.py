"""Ways: the transports of this process, which of them lead to a peer, and in which order they are tried."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tensorlink.errors import NoPathError, TensorLinkError
from tensorlink.paths import End, PathReport, choose
from tensorlink.settings import Settings, admits, check_names
from tensorlink.topology import Topology, discover
from tensorlink.transports import registry
from tensorlink.transports.base import Site, Transport
from tensorlink.types import Figure, PeerId

log = logging.getLogger("tensorlink")

BULK = 1 << 20
"""Bytes that a connection is chosen for: enough that bandwidth counts, few enough that latency does too."""
_COOLING_S = 10.0
_COOLED = "it has just failed, and is avoided for some seconds"
_ELSEWHERE = "elsewhere"


class Ways:
    """What is known of paths to peers. Thread-safe; but for `topology` nothing blocks.

    Raises: NoPathError: no transport can be used in this process; ValueError: a setting names one that isn't installed.
    """

    def __init__(self, settings: Settings, site: Site) -> None:
        self._settings = settings
        self.transports: dict[str, Transport] = {}
        """Those that can be used here, by what they say of themselves: the fastest first."""
        self.rejected: dict[str, str] = {}
        """Transports that cannot be used here, and why."""
        self.measured: Callable[[str, str], Mapping[str, Figure]] = _nothing
        """What was measured between two hosts, by transport; cheap. Whoever has figures puts itself here."""
        self._failed: dict[tuple[str, str], float] = {}  # (peer, transport): when
        self._lock = threading.Lock()
        self._load(site)
        links = tuple(link for transport in self.transports.values() for link in transport.links())
        self._end = End(site.host, links)

    def _load(self, site: Site) -> None:
        self._settings.check_transports(registry.installed())
        usable: list[tuple[float, str, Transport]] = []
        for name in sorted(registry.installed()):
            if not self._settings.allows(name):
                self.rejected[name] = "excluded by the setting transports"
                continue
            transport = registry.load(name)(site)
            links = transport.links()
            why = next((link.unavailable for link in links if link.unavailable), None)
            if why is None:
                usable.append((-max(link.bytes_per_s for link in links), name, transport))
            else:
                self.rejected[name] = why
        if not usable:
            rows = "; ".join(f"{name}: {why}" for name, why in self.rejected.items())
            raise NoPathError(
                f"no transport can be used here ({rows or 'none is installed'})",
                phase="init",
                hint=None
                if rows
                else "Install the package with pip, a checkout by `pip install -e .`: a copy has no entry points",
            )
        usable.sort(key=lambda row: row[:2])
        self.transports.update({name: transport for _, name, transport in usable})

    def addresses(self) -> dict[str, bytes]:
        """What a peer needs to connect to each transport here."""
        return {name: transport.address() for name, transport in self.transports.items()}

    def check(self, only: str) -> None:
        """Raises: ValueError: a text in the form of the setting `transports` names one that isn't installed."""
        check_names(only, self.transports.keys() | self.rejected.keys())

    def topology(self) -> Topology:
        """This machine, looked at when it is first asked for; from then on paths go by it too. Blocks, as `discover` does."""
        with self._lock:
            if self._end.topology is None:
                self._end = replace(self._end, topology=discover(labels=self._settings.labels))
            assert self._end.topology is not None
            return self._end.topology

    def order(
        self,
        peer: PeerId,
        addresses: Mapping[str, bytes],
        host: str | None,
        nbytes: int = BULK,
        only: str | None = None,
    ) -> list[Transport]:
        """The transports that reach a peer, the fastest for so many bytes first, but last those that have just failed.

        Args:
            addresses: the peer's.
            host: its identity; None: not known.
            only: transports that may be used, in the form of the setting `transports`.

        Raises: NoPathError: none does, and why each doesn't.
        """
        report = self._report(peer, addresses, host, nbytes, self._reasons(peer, addresses, only))
        found = [one.transport for one in report.candidates if one.usable]
        if not found:
            raise no_path(peer, [f"{one.transport}: {one.reason}" for one in report.candidates], None)
        return [self.transports[name] for name in sorted(found, key=lambda name: self._cooling(peer, name))]

    def report(
        self, peer: PeerId, addresses: Mapping[str, bytes], host: str | None, nbytes: int, used: str | None
    ) -> PathReport:
        """All paths to a peer for so many bytes, as `order` sees them. `used` is the transport that is connected.

        Raises: ValueError: `nbytes` is negative.
        """
        reasons = self._reasons(peer, addresses, None)
        found = self._report(peer, addresses, host, nbytes, reasons, used)
        usable = {one.transport for one in found.candidates if one.usable}
        cooled = {name: _COOLED for name in usable if self._cooling(peer, name)}
        if 0 < len(cooled) < len(usable):
            return self._report(peer, addresses, host, nbytes, {**reasons, **cooled}, used)
        return found

    def _report(
        self,
        peer: PeerId,
        addresses: Mapping[str, bytes],
        host: str | None,
        nbytes: int,
        reasons: Mapping[str, str],
        used: str | None = None,
    ) -> PathReport:
        here = self._end
        there = host or (here.host if self._near(addresses) else _ELSEWHERE)
        # A peer says by which transports it can be reached, not how fast: it is taken to be as fast as this process.
        remote = replace(here, host=there, topology=here.topology if there == here.host else None)
        measured = self.measured(here.host, there)
        report = choose(here, remote, nbytes, reasons=reasons, measured=measured, connected=(used,) if used else ())
        return replace(report, peer=peer.name, used=used)

    def _reasons(self, peer: PeerId, addresses: Mapping[str, bytes], only: str | None) -> dict[str, str]:
        """The transports that cannot be used for a peer, and why. Raises: CorruptTransferError: an address is none."""
        found = dict.fromkeys(addresses.keys() - self.transports.keys(), "it isn't installed here") | self.rejected
        for name, transport in self.transports.items():
            if not self._settings.allows(name, peer.name):
                found[name] = f"excluded for {peer.name} by the setting paths"
            elif only is not None and not admits(only, name):
                found[name] = "this call excludes it"
            elif name not in addresses:
                found[name] = f"{peer.name} doesn't have it"
            elif why := transport.reaches(transport.address(), addresses[name]):
                found[name] = why
        return found

    def _near(self, addresses: Mapping[str, bytes]) -> bool:
        """Whether a transport that ends with the host reaches it."""
        return any(
            transport.reaches(transport.address(), addresses[name]) is None
            for name, transport in self.transports.items()
            if name in addresses and all(link.reach != "network" for link in transport.links())
        )

    def cool(self, peer: PeerId, failed: Sequence[tuple[str, TensorLinkError]]) -> None:
        """These transports have failed for this peer, each with an error: they are avoided for a while."""
        for transport, error in failed:
            log.warning("the path to %s over %s failed: %s", peer, transport, error.message)
            self._failed[peer.name, transport] = time.monotonic()

    def _cooling(self, peer: PeerId, transport: str) -> bool:
        return time.monotonic() - self._failed.get((peer.name, transport), -_COOLING_S) < _COOLING_S


def no_path(peer: PeerId, reasons: list[str], hint: str | None) -> NoPathError:
    text = f"no transport reaches {peer.name} ({'; '.join(reasons)})"
    return NoPathError(text, peer=str(peer), phase="connect", hint=hint)


def _nothing(here: str, there: str) -> Mapping[str, Figure]:
    return {}
