"""Inside torchrun: ranks find each other by the store that torchrun gives them, and rank 0 brings the coordinator."""

from __future__ import annotations

import datetime
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tensorlink import network
from tensorlink.control import host_identity, listen_address
from tensorlink.errors import PeerLostError
from tensorlink.rendezvous import Place, Rendezvous
from tensorlink.settings import Settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from tensorlink.control import Hosted

log = logging.getLogger("tensorlink")

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOK_S = 0.05
_ANSWER_S = 2.0

Found = dict[str, str | None]
"""What the store has: the coordinator, the token, and which process started it."""


def detect(asked: bool, env: Mapping[str, str] | None = None) -> Rendezvous | None:
    """That of this process: under torchrun, and if it is asked for by name, wherever torch's four variables are set."""
    env = os.environ if env is None else env
    if not all(env.get(name) for name in _NEEDED) or not (asked or "TORCHELASTIC_RUN_ID" in env):
        return None
    return Torchrun(env)


class Torchrun(Rendezvous):
    """The ranks of one start of a job. torchrun starts all workers anew when one fails, and that is another membership: they have
    a coordinator of their own, and never hear of those before."""

    name = "torchrun"

    def __init__(self, env: Mapping[str, str]) -> None:
        self._rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        super().__init__(f"rank{self._rank}")
        self._master = (env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        self._agent_has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._several_hosts = world > int(env.get("LOCAL_WORLD_SIZE", world))
        self._store: Store | None = None
        self._hosted: Hosted | None = None

    def look(self, settings: Settings, timeout: float) -> Place:
        """Blocks until rank 0 has called `init` too. Raises: PeerLostError: it hasn't, or the store is not there."""
        deadline = time.monotonic() + timeout
        key = f"{settings.namespace}/{self._attempt}"
        try:
            store = self._open(timeout)
            found = self._read(store, key, 0 if self._rank == 0 else deadline - time.monotonic())
            if self._rank == 0 and not self._is_mine(found):
                found = self._host(settings, found, deadline - time.monotonic())
                store.set(key, json.dumps(found))
        except RuntimeError as error:  # what torch raises where a store is gone
            self._store = None
            raise PeerLostError(f"the store of {self._where} cannot be used: {error}", phase="join") from None
        if found is None:
            raise PeerLostError(
                f"rank 0 has not called tensorlink.init() yet (the store of {self._where})", phase="join"
            )
        return Place(found["coordinator"] or "", found["token"])

    @property
    def _where(self) -> str:
        return f"torchrun at {network.join_address(*self._master)}"

    def _open(self, timeout: float) -> Store:
        """A store of our own, as torch's `env://` makes it: it harms no process group, before or after. Where no agent has its
        server, that is in rank 0, and shared with a process group there."""
        if self._store is None:
            from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

            server = self._rank == 0 and not self._agent_has_store
            patience = datetime.timedelta(seconds=max(timeout, 1.0))
            host, port = self._master
            plain = TCPStore(host, port, None, server, patience, wait_for_workers=False, multi_tenant=server)
            self._store = PrefixStore("tensorlink", plain)
        return self._store

    def _read(self, store: Store, key: str, patience_s: float) -> Found | None:
        deadline = time.monotonic() + patience_s
        while not store.check([key]):  # short looks, so that Ctrl-C and `close` end them
            if time.monotonic() >= deadline or self._closed.wait(_LOOK_S):
                return None
        found: Found = json.loads(store.get(key))
        return found

    def _is_mine(self, found: Found | None) -> bool:
        """Whether what rank 0 finds is a coordinator that this very process started, and that is still there."""
        if found is None or found["starter"] != _identity():
            return False
        try:
            network.connectable(*network.split_address(found["coordinator"] or ""), _ANSWER_S)
        except (OSError, ValueError):
            return False
        return True

    def _host(self, settings: Settings, before: Found | None, timeout: float) -> Found:
        """Starts a coordinator. The user's token is never shown in the store; one that was made is, and is kept if this process
        had started another one `before`."""
        shown = before["token"] if before is not None and before["starter"] == _identity() else None
        if shown is None and not (settings.token or settings.tls_cert):
            shown = secrets.token_hex(32)
        token = shown or settings.token
        towards = replace(settings, token=token, coordinator=network.join_address(*self._master))
        host = listen_address(towards) or "127.0.0.1"
        if self._several_hosts and host.startswith("127.") and not network.is_ip(self._master[0]):
            log.warning(
                "%s is %s here, where other hosts cannot reach rank 0: set TENSORLINK_INTERFACE", self._master[0], host
            )
        from tensorlink.control import Hosted  # no other rank needs the service

        self._let_go()
        self._hosted = Hosted(towards, host, max(timeout, 1.0))
        return {"coordinator": self._hosted.address, "token": shown, "starter": _identity()}

    def _let_go(self) -> None:
        if self._hosted is not None:
            self._hosted.release()

    def close(self) -> None:
        super().close()
        self._let_go()


def _identity() -> str:
    return f"{host_identity()}:{os.getpid()}"
