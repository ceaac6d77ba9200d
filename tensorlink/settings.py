"""All settings in one place: arguments of `init` first, then `TENSORLINK_*` environment variables, then defaults."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tensorlink import network

ENV_PREFIX = "TENSORLINK_"
NO_RENDEZVOUS = "none"
INTERFACE = re.compile(r"[^\s/:,]{1,15}")
NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def memory_limit_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The memory this process may use: the smallest limit of the cgroups it lies in, or the host's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, name in _memory_groups(cgroups, own):
        # In a container the path in /proc may be the host's; its own group is then the root of what it sees.
        for folder in (group, *group.parents):
            if folder.is_relative_to(cgroups):
                limits += _limit(folder / name)
    return min(limits)


def _memory_groups(cgroups: Path, own: Path) -> list[tuple[Path, str]]:
    """The cgroups of this process that limit memory, each with the name of the file that says so."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups.append((cgroups / path.lstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            groups.append((cgroups / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return groups


def _limit(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) > 0 else []


def _quarter_of_memory() -> int:
    return memory_limit_bytes() // 4


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_labels(text: str) -> dict[str, str]:
    """`rack=7,zone=a` as a dict. Raises: ValueError: something in it isn't NAME=VALUE, or a name comes twice."""
    labels: dict[str, str] = {}
    for part in _names(text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value) or name in labels:
            raise ValueError(f"labels must be like rack=7,zone=a, each name once, not {part!r}")
        labels[name] = value
    return labels


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one endpoint behaves. Each field is read from `TENSORLINK_<FIELD>` where no argument gives it."""

    coordinator: str | None = None
    """`HOST:PORT` or `unix:PATH` of the coordinator; None: the one of this user and namespace on this host."""
    rendezvous: str | None = None
    """How the coordinator is found where none is named, by what runs this process: the name of a plugin, or `none`. None: by
    what is there, if anything is."""
    interface: str | None = None
    """Where other hosts reach this peer: the name of a network interface, `eth0`, or an IP address of this host. None:
    the address from which it reaches its coordinator. Peers listen for other hosts only where there is a token."""
    ports: str | None = None
    """Ports of all TCP listeners of this process, `20000-20100`; None: any that are free."""
    transports: str | None = None
    """Allowed transports, `shm,local`, or forbidden ones, `^shm`; None: all that are installed."""
    paths: str | None = None
    """The same for peers by name, beside `transports`: `trainer=tcp; rollout*=^shm`. Rules end with a `;`; the name is a pattern
    (`*`, `?`, `[0-9]`), and of the rules that fit a peer the first counts. None: no peer is different."""
    token: str | None = field(default=None, repr=False)
    """Shared secret of the job. Needed wherever a listener is not a unix socket, unless there are certificates."""
    tls_cert: str | None = None
    """PEM file: the certificate that this process shows to other hosts, and what leads from it to the CA. With it all that goes
    over TCP is encrypted, and both sides must show one. It goes together with `tls_key` and `tls_ca`."""
    tls_key: str | None = None
    """PEM file: the certificate's private key, not encrypted."""
    tls_ca: str | None = None
    """PEM file: the CA, or CAs, of all certificates of the job."""
    timeout: float = 60.0
    """Default deadline of every operation, seconds."""
    pool_bytes: int = field(default_factory=_quarter_of_memory)
    """Hard budget of the pool. Default: a quarter of the memory limit of the container or host."""
    namespace: str = "default"
    """Keeps two jobs of one user apart."""
    lease_s: float = 5.0
    """A peer that is silent for this long is down."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where this process runs, `rack=7,zone=a`: names and values by which peers that are near each other are found."""
    control: str = "auto"
    """`auto`: messages ride the lane of a connection once it stands; `grpc`: everything stays on gRPC."""
    verify: bool = False
    """Every object gets a checksum when it is put, sent or published, and its readers check it."""
    max_bytes_per_s: int | None = None
    """What is sent to one peer on another host at most, in bulk; None: as fast as it goes."""
    flight: str | None = None
    """Directory of the flight recorder's files, `off` for none; None: where the sockets of this user lie."""
    measured: str | None = None
    """Folder of the file of measured figures, `off` for none; None: the cache of this user."""
    log: str = "WARNING"
    """Level of the `tensorlink` logger."""

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
        """Settings from the arguments that are not None, then the environment, then the defaults.

        Raises:
            ValueError: a value cannot be parsed; the message names the variable.
        """
        source = os.environ if env is None else env
        values: dict[str, Any] = {}
        for spec in fields(cls):
            given = arguments.pop(spec.name, None)
            if given is not None:
                values[spec.name] = given
                continue
            variable = ENV_PREFIX + spec.name.upper()
            text = source.get(variable)
            if text:
                values[spec.name] = _parse(variable, spec.name, text)
        if arguments:
            raise TypeError(f"unknown settings: {', '.join(sorted(arguments))}")
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("timeout", "lease_s", "pool_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)!r}")
        if self.max_bytes_per_s is not None and self.max_bytes_per_s < 1:
            raise ValueError(f"max_bytes_per_s must be positive, not {self.max_bytes_per_s!r}")
        if self.control not in ("auto", "grpc"):
            raise ValueError(f"control must be 'auto' or 'grpc', not {self.control!r}")
        if self.log.upper() not in logging.getLevelNamesMapping():
            raise ValueError(f"log must name a level such as 'INFO', not {self.log!r}")
        self._check_network()
        _rules(self.paths)
        if not NAMESPACE.fullmatch(self.namespace):  # becomes part of a path
            raise ValueError(
                f"namespace must be 1 to 64 letters, digits, '-', '_' or '.', not '.' first, not {self.namespace!r}"
            )

    @property
    def known_to_others(self) -> bool:
        """Whether strangers can be told from peers, so that this process may be reached by TCP."""
        return bool(self.token or self.tls_cert)

    def _check_network(self) -> None:
        """Raises: ValueError: `coordinator`, `interface` or `ports` is none, or a file for TLS isn't named."""
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        missing = [ENV_PREFIX + name.upper() for name, path in files.items() if not path]
        if 0 < len(missing) < len(files):
            raise ValueError(f"TLS needs a certificate, its key and the CA: {' and '.join(missing)} must be set too")
        if self.coordinator is not None and not self.coordinator.startswith("unix:"):
            try:
                network.split_address(self.coordinator)
            except ValueError as error:
                raise ValueError(f"coordinator must be HOST:PORT or unix:PATH: {error}") from None
        network.port_range(self.ports)
        named = self.interface
        if named is not None and not (network.is_ip(named) or INTERFACE.fullmatch(named)):
            raise ValueError(f"interface must be a network interface such as eth0, or an IP address, not {named!r}")
        if named is not None and network.is_wildcard(named):
            raise ValueError(f"interface must be one that others can name, not {named!r}")

    def check_transports(self, installed: Collection[str]) -> None:
        """Raises: ValueError: the settings `transports` or `paths` name one that isn't installed."""
        check_names(self.transports, installed)
        for name, only in _rules(self.paths):
            try:
                check_names(only, installed)
            except ValueError as error:
                raise ValueError(f"paths (TENSORLINK_PATHS), {name}={only}: {error}") from None

    def allows(self, transport: str, peer: str | None = None) -> bool:
        """Whether the setting `transports` admits this transport, and for a peer of that name the setting `paths` too."""
        if not admits(self.transports, transport):
            return False
        rules = _rules(self.paths) if peer is not None else ()
        return admits(next((only for name, only in rules if fnmatchcase(peer or "", name)), None), transport)


def admits(text: str | None, transport: str) -> bool:
    """Whether `shm,tcp`, which allows, or `^shm`, which forbids, admits a transport. None admits all."""
    if text is None:
        return True
    return transport not in _names(text[1:]) if text.startswith("^") else transport in _names(text)


def check_names(text: str | None, installed: Collection[str]) -> None:
    """Raises: ValueError: such a text names none at all, or one that isn't installed; TypeError: it is no text."""
    if text is not None and not isinstance(text, str):
        raise TypeError(f"transports are a str such as 'shm,tcp' or '^shm', not a {type(text).__name__}")
    if text is not None and not _names(text.removeprefix("^")):
        raise ValueError(f"transports must name at least one, such as 'shm,tcp' or '^shm', not {text!r}")
    for name in _names((text or "").removeprefix("^")):
        if name not in installed:
            raise ValueError(f"no transport {name!r} is installed; there are: {', '.join(sorted(installed))}")


def _rules(text: str | None) -> list[tuple[str, str]]:
    """Patterns of names with what each allows. Raises: ValueError: a rule isn't PATTERN=TRANSPORTS."""
    rules = []
    for part in (text or "").split(";"):
        name, _, only = (piece.strip() for piece in part.rpartition("="))
        if name and _names(only.removeprefix("^")):
            rules.append((name, only))
        elif part.strip():
            raise ValueError(f"paths (TENSORLINK_PATHS) must be like trainer=tcp; rollout*=^shm, not {part.strip()!r}")
    return rules


def _parse(variable: str, name: str, text: str) -> Any:
    convert, kind = _PARSERS.get(name, (str, "text"))
    try:
        return convert(text)
    except (ValueError, KeyError):
        raise ValueError(f"{variable} must be {kind}, not {text!r}") from None


def flag(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


_PARSERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "timeout": (float, "a number of seconds"),
    "lease_s": (float, "a number of seconds"),
    "labels": (parse_labels, "labels like rack=7,zone=a"),
    "pool_bytes": (int, "a whole number of bytes"),
    "max_bytes_per_s": (int, "a whole number of bytes"),
    "verify": (flag, "0 or 1"),
}
