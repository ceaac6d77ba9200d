"""Mutual TLS of the control channel: who has no fitting certificate is told so, on either side."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorlink as tl
from tensorlink import network
from tensorlink.control import Certificates, PeerClient, PeerServer, list_peers, serve
from tensorlink.control.certificates import _own
from tensorlink.settings import Settings
from tensorlink.types import PeerId
from tests.authority import Authority, Tap, authority, other
from tests.control.control_member import Handlers
from tests.peer import Peer, nursery, say, spawn

__all__ = ["authority", "nursery", "other", "spawn"]

pytestmark = pytest.mark.usefixtures("nursery")

ME = PeerId("a", 7)
ALL = "TENSORLINK_TLS_CERT"  # every hint names it


def load(environment: dict[str, str]) -> Certificates | None:
    return Certificates.load(Settings.load(environment))


@pytest.fixture
def good(authority: Authority) -> dict[str, str]:
    return authority.issue("good")


@pytest.fixture
def server(good: dict[str, str], run_dir: Path) -> Iterator[PeerServer]:
    server = PeerServer(Handlers(), name="b", listen="127.0.0.1", certificates=load(good))
    yield server
    server.close()


def far(server: PeerServer) -> str:
    return server.address.partition(",")[2]


def ping(target: str, certificates: Certificates | None) -> PeerId:
    client = PeerClient(target, peer="b", me=ME, certificates=certificates)
    try:
        return client.ping(10)
    finally:
        client.close()


def test_calls_by_tls(server: PeerServer, authority: Authority) -> None:
    assert ping(far(server), load(authority.issue("caller"))).name == "b"
    assert ping(server.address, None).name == "b"  # by the unix socket, as ever


def test_what_is_said_cannot_be_read_on_the_way(server: PeerServer, authority: Authority) -> None:
    with Tap(*network.split_address(far(server))) as tap:
        client = PeerClient(f"127.0.0.1:{tap.port}", peer="b", me=ME, certificates=load(authority.issue("caller")))
        assert client.deliver(1, "a tag that tells", b"something to tell" * 100, 10) == b""
        client.close()
    assert len(tap.seen) > 1000
    assert b"tell" not in tap.seen


def test_callers_without_a_fitting_certificate(server: PeerServer, authority: Authority, other: Authority) -> None:
    with pytest.raises(tl.AuthenticationError, match=f"nothing but TLS.*{ALL}"):
        ping(far(server), None)
    stranger = other.issue("stranger")
    with pytest.raises(tl.AuthenticationError, match=f"is refused here: unable to get local issuer.*{ALL}"):
        ping(far(server), load(stranger))
    bad = [stranger, authority.issue("expired", days=-1), authority.issue("server", more="extendedKeyUsage=serverAuth")]
    for environment in bad:  # tried by hand: `load` wouldn't have them
        environment["TENSORLINK_TLS_CA"] = str(authority.ca)
        with pytest.raises(tl.AuthenticationError, match=f"refuses the certificate of this process.*{ALL}"):
            ping(far(server), unchecked(environment))
    with pytest.raises(tl.AuthenticationError, match=f"isn't for the DNS name tensorlink.*{ALL}"):
        ping(far(server), unchecked(authority.issue("misnamed", name="host7")))
    assert ping(far(server), load(authority.issue("caller"))).name == "b"


def unchecked(environment: dict[str, str]) -> Certificates:
    settings = Settings.load(environment)
    files = (settings.tls_cert or "", settings.tls_key or "", settings.tls_ca or "")
    probe = _own(files, ssl.PROTOCOL_TLS_CLIENT)
    cert, key, ca = (Path(path).read_bytes() for path in files)
    return Certificates((*files, "tensorlink"), cert, key, ca, probe)


def test_why_it_is_refused_though_the_files_are_new_ones(server: PeerServer, other: Authority, tmp_path: Path) -> None:
    """A process goes on with the certificates that it began with, and the reason is theirs."""
    own, successor = Authority(tmp_path).issue("own"), other.issue("successor")
    certificates = load(own)
    for variable, file in own.items():
        Path(file).write_bytes(Path(successor[variable]).read_bytes())
    with pytest.raises(tl.AuthenticationError, match="certificate of .* is refused here"):
        ping(far(server), certificates)
    for file in own.values():
        Path(file).unlink()
    with pytest.raises(tl.AuthenticationError, match="certificate of .* is refused here"):
        ping(far(server), certificates)


def test_a_listener_without_tls(good: dict[str, str], run_dir: Path) -> None:
    server = PeerServer(Handlers(), name="b", listen="127.0.0.1", token="secret")
    with pytest.raises(tl.AuthenticationError, match=f"doesn't use TLS, and this process.*{ALL}"):
        ping(far(server), load(good))
    server.close()


def test_certificates_are_tried_out_before_anybody_is_called(
    authority: Authority, other: Authority, good: dict[str, str], tmp_path: Path
) -> None:
    def refused(environment: dict[str, str]) -> str:
        with pytest.raises(tl.AuthenticationError, match=ALL) as raised:
            load(environment)
        return raised.value.message

    assert "certificate has expired" in refused(authority.issue("late", days=-1))
    assert "unable to get local issuer" in refused({**good, "TENSORLINK_TLS_CA": str(other.ca)})
    assert "Hostname mismatch" in refused(authority.issue("else", name="host7"))
    assert "unsuitable certificate purpose" in refused(authority.issue("one", more="extendedKeyUsage=clientAuth"))
    assert "KEY_VALUES_MISMATCH" in refused({**good, "TENSORLINK_TLS_KEY": other.issue("x")["TENSORLINK_TLS_KEY"]})
    assert "No such file" in refused({**good, "TENSORLINK_TLS_CERT": str(tmp_path / "nowhere.pem")})
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    assert "can't be used" in refused({**good, "TENSORLINK_TLS_CERT": str(nonsense)})
    key = Path(good["TENSORLINK_TLS_KEY"]).read_text()
    assert key not in repr(load(good))
    with pytest.raises(ValueError, match="TENSORLINK_TLS_KEY and TENSORLINK_TLS_CA must be set too"):
        load({"TENSORLINK_TLS_CERT": "x"})


def coordinate(listen: str) -> None:
    serve(Settings.load(), listen, say)


def test_a_coordinator_needs_no_token_then(
    authority: Authority, other: Authority, good: dict[str, str], spawn: Callable[..., Peer], run_dir: Path
) -> None:
    coordinator = spawn(**good)
    coordinator.start(coordinate, "127.0.0.1:0")
    at = {"TENSORLINK_COORDINATOR": coordinator.hear()}
    assert list_peers(Settings.load({**at, **good}), 10) == []
    with pytest.raises(tl.AuthenticationError, match="needs a token or certificates"):
        list_peers(Settings.load(at), 10)
    with pytest.raises(tl.AuthenticationError, match=f"nothing but TLS.*{ALL}"):
        list_peers(Settings.load({**at, "TENSORLINK_TOKEN": "secret"}), 10)
    with pytest.raises(tl.AuthenticationError, match=f"is refused here: unable to get local issuer.*{ALL}"):
        tl.init("a", coordinator=at["TENSORLINK_COORDINATOR"], **named(other.issue("a")))


def named(environment: dict[str, str]) -> dict[str, Any]:
    """As arguments of `init`."""
    return {name.removeprefix("TENSORLINK_").lower(): value for name, value in environment.items()}
