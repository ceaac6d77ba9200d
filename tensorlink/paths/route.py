"""The way that the bytes of a transport take between two ends."""

from __future__ import annotations

from tensorlink.paths.ends import End
from tensorlink.paths.model import Hop, Way
from tensorlink.types import Link


def medium(link: Link) -> str:
    """What the bytes of a link pass: `memory`, `gpu` or `nic`."""
    return link.over or ("nic" if link.reach == "network" else "memory")


def route(local: End, remote: End, link: Link) -> Way:
    """The way from `local` to `remote` over such a link of both. Raises: KeyError: a device that its topology doesn't have."""
    same = local.host == remote.host
    if medium(link) == "nic" or not same:
        if same and local.kind == remote.kind == "cpu":
            return Way((Hop("loopback"),))
        out, into = local.leaving[link.stripes], remote.arriving[link.stripes]
        return Way(out.hops + into.hops, out.nics)
    if medium(link) == "gpu":
        return Way((_between(local, remote),))
    if local.kind == remote.kind == "cpu":
        return _within(local, remote)
    return Way((*_to_memory(local), Hop("memory"), *reversed(_to_memory(remote))))


def _within(local: End, remote: End) -> Way:
    """Memory to memory: between two NUMA nodes there is a link."""
    if local.place is None or remote.place is None or local.place.name == remote.place.name:
        return Way((Hop("memory"),))
    return Way((_between(local, remote),))


def _between(local: End, remote: End) -> Hop:
    """The link of one topology between two of its devices, as far as it is known."""
    if local.device == remote.device:
        return Hop(f"memory of {local.device}")
    what = f"{local.device} - {remote.device}"
    if local.topology is None or local.place is None or remote.place is None:
        return Hop(what)
    link = local.topology.between(local.place.name, remote.place.name)
    return Hop(what) if link is None else Hop(what, link.link_class, link.bytes_per_s)


def _to_memory(end: End) -> tuple[Hop, ...]:
    """From a device to the nearest memory of its host; nothing where it is that memory."""
    if end.kind == "cpu":
        return ()
    if end.topology is not None:
        for cpu in end.topology.nearest(end.device, "cpu"):
            link = end.topology.between(end.device, cpu.name)
            if link is not None:
                return (Hop(f"{end.device} - {cpu.name}", link.link_class, link.bytes_per_s),)
    return (Hop(f"{end.device} - memory"),)
