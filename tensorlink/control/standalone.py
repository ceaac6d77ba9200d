"""A coordinator in the foreground, as `tensorlink coordinator` runs it: for several hosts, or to be supervised."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from tensorlink import network
from tensorlink.control import embedded, runtime_dir
from tensorlink.control.certificates import Certificates
from tensorlink.control.coordinator import Coordinator
from tensorlink.errors import NameInUseError
from tensorlink.settings import Settings


def serve(settings: Settings, listen: str | None, announce: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. Blocks; to be called on the main thread.

    Listens on TCP at `listen`, `HOST:PORT` (port 0: a free one of the setting `ports`), or, if None, on the unix socket
    where peers of this user and namespace look. `announce` gets the address once it is there.

    Raises:
        AuthenticationError: `listen` is given and there is no token and no certificate, or that is no use.
        NameInUseError: this namespace has a coordinator.
        TransportError: the address cannot be bound.
        ValueError: `listen` is no HOST:PORT.
    """
    if listen is None:
        asyncio.run(_serve_unix(settings, announce))
        return
    asyncio.run(_serve_tcp(settings, *network.split_address(listen), announce))


async def _serve_tcp(settings: Settings, host: str, port: int, announce: Callable[[str], None]) -> None:
    certificates = Certificates.load(settings)
    coordinator = Coordinator(token=settings.token, lease_s=settings.lease_s, certificates=certificates)
    try:
        bound = await coordinator.listen_tcp(host, port, settings.ports)
        announce(network.join_address(host, bound))
        await _stopped()
    finally:
        await coordinator.stop()


async def _serve_unix(settings: Settings, announce: Callable[[str], None]) -> None:
    path = runtime_dir.coordinator_socket(runtime_dir.runtime_dir(), settings.namespace)
    lock = embedded.take_lock(path.with_suffix(".lock"))
    if lock is None:
        raise NameInUseError(
            f"namespace {settings.namespace!r} has a coordinator",
            hint="Use it, or choose another TENSORLINK_NAMESPACE",
        )
    try:
        coordinator = Coordinator(token=settings.token, lease_s=settings.lease_s)
        async with embedded.serving(coordinator, path, lock) as displaced:
            announce(f"unix:{path}")
            await asyncio.wait([asyncio.create_task(_stopped()), displaced], return_when=asyncio.FIRST_COMPLETED)
    finally:
        os.close(lock)


async def _stopped() -> None:
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    await done.wait()
