"""Which path a peer is reached by, where one that looks good doesn't work."""

from __future__ import annotations

import dataclasses
import os
import socket

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import links
from tensorlink.testing.faults import Relay
from tensorlink.transports.tcp import TcpAddress


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
