"""Mutual TLS: the certificates of this process, and why one of two processes refuses the other's.

All certificates of a job are signed by one CA and carry one agreed name, `NAME`, among their DNS names. Peers are reached by
addresses that change, so nobody checks where the other side is: only that the CA vouches for it now, for this
purpose and under that name.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tensorlink import network
from tensorlink.errors import AuthenticationError
from tensorlink.settings import Settings

NAME = "tensorlink"
HINT = (
    f"Every process of a job needs TENSORLINK_TLS_CERT, _KEY and _CA: certificates of one CA, for the DNS name {NAME}"
)
_PROBE_S = 1.0
_PAUSE_S = 0.1
_PLAIN = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}


@dataclass(frozen=True)
class Certificates:
    """What this process shows, and whom it believes."""

    files: tuple[str, str, str, str]
    """Where certificate, key and CA lie, and the name in all certificates: as the engine takes them."""
    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    probe: ssl.SSLContext = field(repr=False, compare=False)
    """The same for a call by the standard library: what lies in the files by now may be something else."""

    @classmethod
    def load(cls, settings: Settings) -> Certificates | None:
        """Those of the settings, tried out; None: there are none.

        Raises: AuthenticationError: a file is missing or no use, or the certificate wouldn't be accepted by its like.
        """
        if not (settings.tls_cert and settings.tls_key and settings.tls_ca):
            return None
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        try:
            cert, key, ca = (Path(name).read_bytes() for name in files)
            client, server = (_own(files, end) for end in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
            _shake_hands(client, server)
        except ssl.SSLCertVerificationError as error:
            raise _useless(f"{files[0]} is refused by {files[2]}: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise _useless(f"{' and '.join(files)} can't be used: {error.reason or error}") from None
        except OSError as error:
            raise _useless(f"cannot read {error.filename}: {error.strerror}") from None
        return cls((*files, NAME), cert, key, ca, client)

    def channel(self) -> grpc.ChannelCredentials:
        """For calls; `NAME` must override the target's name."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def listener(self) -> grpc.ServerCredentials:
        """For a port whose callers must show a certificate of the CA."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)


def _own(files: tuple[str, str, str], protocol: int) -> ssl.SSLContext:
    """Raises: OSError, of which ssl.SSLError is one."""
    cert, key, ca = files
    context = _context(protocol)
    context.load_cert_chain(cert, key, password=lambda: b"")  # rather fail than ask a terminal
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])  # gRPC's listeners insist on it
    return context


def _useless(why: str) -> AuthenticationError:
    return AuthenticationError(f"the certificates of this process: {why}", phase="init", hint=HINT)


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake in memory. Raises: ssl.SSLError: as two processes with these certificates would."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=NAME), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def check_caller(auth: Mapping[str, Any]) -> None:
    """`auth` is the context of a call. Raises: AuthenticationError: it came by TLS, under another name than `NAME`."""
    if b"ssl" in auth.get("transport_security_type", ()) and NAME.encode() not in auth.get("peer_dns", ()):
        raise AuthenticationError(f"the certificate of the caller isn't for the DNS name {NAME}", hint=HINT)


def explain(target: str, certificates: Certificates | None) -> AuthenticationError | None:
    """Why calls of `target`, which is there, come to nothing, if it is that the two don't agree about certificates.

    Blocks for two seconds at most, and connects there twice.
    """
    if target.startswith("unix:"):
        return None
    try:
        why = _tried(target, certificates)
        if why == _refusal(target):  # or it ended in that moment
            time.sleep(_PAUSE_S)
            why = _tried(target, certificates)
    except (OSError, ValueError):
        return None
    return AuthenticationError(why, hint=HINT) if why else None


def _refusal(target: str) -> str:
    return f"{target} refuses the certificate of this process"


def _tried(target: str, certificates: Certificates | None) -> str | None:
    """Raises: OSError: nothing can be said."""
    if certificates:
        context = certificates.probe
    else:
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        plain = socket.create_connection(network.split_address(target), _PROBE_S)
        with plain, context.wrap_socket(plain, server_hostname=NAME) as shaken:
            if certificates is None:
                return f"{target} takes nothing but TLS, and this process has no certificates"
            return None if shaken.recv(1) else _refusal(target)  # gRPC says no more
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {target} is refused here: {error.verify_message}"
    except ssl.SSLError as error:
        if certificates and error.reason in _PLAIN:
            return f"{target} doesn't use TLS, and this process has certificates and uses nothing else"
        if certificates and "ALERT" in (error.reason or ""):
            return f"{_refusal(target)}: {error.reason}"
        raise
