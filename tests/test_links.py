"""Which path a peer is reached by where one that looks good doesn't work, and how it is found again."""

from __future__ import annotations

import dataclasses
import os
import queue
import socket

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import links
from tensorlink.lifecycle import Refused
from tensorlink.testing.faults import Relay
from tensorlink.transports.tcp import TcpAddress
from tensorlink.types import PeerId
from tests.peer import eventually


def test_a_path_that_does_not_work_gives_way_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """As between two containers of one host that share no files."""
    with tl.init("a", token="secret") as a, tl.init("b", token="secret") as b:
        os.unlink(b._links.transports["shm"].site.socket_path)
        a.send(np.arange(100_000), "b")
        assert (b.recv("a") == np.arange(100_000)).all()
        assert a.stats()["peers"]["b"]["pid"] == 0, "it went over the network"
        assert (a.get(b.put(np.arange(10))) == np.arange(10)).all()
        assert "over shm failed" in caplog.text


def test_with_no_other_path_the_error_lists_what_was_tried(caplog: pytest.LogCaptureFixture) -> None:
    with tl.init("a") as a, tl.init("b") as b:
        os.unlink(b._links.transports["shm"].site.socket_path)
        with pytest.raises(tl.NoPathError, match=r"shm: cannot connect.*TENSORLINK_INTERFACE"):
            a.send(1, "b")
        assert "over shm failed" in caplog.text


class SwallowingOnce(Relay):
    """Keeps its first connection without a word, as a network does that swallows the first packets."""

    kept: socket.socket | None = None

    def _accept(self) -> None:
        if self.kept is None:
            self.kept, _ = self._listener.accept()
        else:
            super()._accept()


def test_an_attempt_that_gets_no_answer_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_TRY_S", 0.3)
    with tl.init("a", token="secret", transports="tcp") as a, tl.init("b", token="secret", transports="tcp") as b:
        tcp = b._links.transports["tcp"]
        true = TcpAddress.decode(tcp.address())
        with SwallowingOnce(true.host, true.port) as relay:
            monkeypatch.setattr(tcp, "address", dataclasses.replace(true, port=relay.port).encode)
            a.send(1, "b", timeout=30)
            assert b.recv("a") == 1
            assert relay.kept is not None
            relay.kept.close()


@pytest.mark.parametrize("control", ["auto", "grpc"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_who_was_wrongly_taken_for_gone_is_there_again_when_it_sends(control: str, transports: str) -> None:
    """As when something on the way refuses a probe of its port."""
    settings = {"control": control, "transports": transports, "token": "secret"}
    with tl.init("a", **settings) as a, tl.init("b", **settings) as b:
        b.send(0, "a")
        a.send(a.recv("b"), "b")
        assert b.recv("a") == 0
        hooks: queue.SimpleQueue[str] = queue.SimpleQueue()
        b.on("peer_down", lambda peer, reason: hooks.put("down"))
        b.on("peer_up", lambda peer: hooks.put("up"))
        b._control.roster.hear(Refused(PeerId("a", b._control.last_incarnation("a"))))
        eventually(lambda: b._engine.is_down(b._engine.source("a")), "it is taken for gone")
        a.send(1, "b", tag="not taken yet")
        a.send(np.arange(1_000_000), "b")
        assert (b.recv() == np.arange(1_000_000)).all()
        b.send(2, "a")
        assert a.recv("b") == 2
        while hooks.get(timeout=5) != "up":
            pass
        a.send(3, "b")
        assert b.recv("a") == 3
        assert b.recv("a", tag="not taken yet") == 1
