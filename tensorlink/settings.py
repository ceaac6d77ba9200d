"""All settings in one place: arguments of `init` first, then `TENSORLINK_*` environment variables, then defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ENV_PREFIX = "TENSORLINK_"


def memory_limit_bytes() -> int:
    """The memory this process may use: the smallest cgroup limit above it, or the host's memory."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [host]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _quarter_of_memory() -> int:
    return memory_limit_bytes() // 4


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one endpoint behaves. Each field is read from `TENSORLINK_<FIELD>` where no argument gives it."""

    coordinator: str | None = None
    """`HOST:PORT` or `unix:PATH` of the coordinator; None: the one of this user and namespace on this host."""
    transports: str | None = None
    """Allowed transports, `shm,local`, or forbidden ones, `^shm`; None: all that are installed."""
    token: str | None = field(default=None, repr=False)
    """Shared secret of the job. Needed wherever a listener is not a unix socket."""
    timeout: float = 60.0
    """Default deadline of every operation, seconds."""
    pool_bytes: int = field(default_factory=_quarter_of_memory)
    """Hard budget of the pool. Default: a quarter of the memory limit of the container or host."""
    namespace: str = "default"
    """Keeps two jobs of one user apart."""
    lease_s: float = 5.0
    """A peer that is silent for this long is down."""
    control: str = "auto"
    """`auto`: messages ride the lane of a connection once it stands; `grpc`: everything stays on gRPC."""
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
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if self.control not in ("auto", "grpc"):
            raise ValueError(f"control must be 'auto' or 'grpc', not {self.control!r}")
        if not self.namespace.replace("-", "").replace("_", "").replace(".", "").isalnum() or "/" in self.namespace:
            raise ValueError(f"namespace may hold letters, digits, '-', '_' and '.', not {self.namespace!r}")

    def allows(self, transport: str) -> bool:
        """Whether the setting `transports` admits this transport."""
        if self.transports is None:
            return True
        if self.transports.startswith("^"):
            return transport not in _names(self.transports[1:])
        return transport in _names(self.transports)


def _parse(variable: str, name: str, text: str) -> Any:
    convert = {"timeout": float, "lease_s": float, "pool_bytes": int}.get(name, str)
    try:
        return convert(text)
    except ValueError:
        raise ValueError(f"{variable} must be a {convert.__name__}, not {text!r}") from None
