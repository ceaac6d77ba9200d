"""Parsers in Python of what comes from peers, and all that they may do with bad bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tensorlink import _core
from tensorlink.control import control_pb2 as pb
from tensorlink.control.wire import check_name, check_token, error_of, peer_from_pb
from tensorlink.errors import AuthenticationError, CorruptTransferError
from tensorlink.recording import parse
from tensorlink.transports.pool import Address
from tensorlink.transports.tcp import TcpAddress
from tensorlink.types import TensorRef

CORPUS = Path(__file__).parent / "corpus"
PAYLOAD = np.zeros(1024, np.uint8)


def handle(data: bytes) -> None:
    ref = TensorRef.from_bytes(data)
    assert TensorRef.from_bytes(ref.to_bytes()) == ref
    repr(ref)
    if ref.layout is not None:
        assert 0 <= ref.layout.nbytes < 1 << 63
    for descriptor in ref.descriptors.values():
        _core.claim_of(descriptor)


def address(data: bytes) -> None:
    kinds: tuple[type[TcpAddress] | type[Address], ...] = (TcpAddress, Address)
    for kind in kinds:
        try:
            decoded = kind.decode(data)
        except CorruptTransferError:
            continue
        assert kind.decode(decoded.encode()) == decoded
        where = decoded.host if isinstance(decoded, TcpAddress) else decoded.path
        assert b"\0" not in where.encode()  # it goes to the core, which takes UTF-8 and ends at a zero byte


def flight(data: bytes) -> None:
    for second in (data, data[: len(data) // 2].ljust(len(data), b"\1")):  # somebody wrote between the two looks
        try:
            found = parse(data, second, Path("flight"))
        except CorruptTransferError:
            continue
        for row in (*found.operations, *found.events):
            assert row.told(found.now).isprintable()


def peer(data: bytes) -> None:
    message = pb.Peer()
    try:
        message.ParseFromString(data)
    except Exception as error:
        raise CorruptTransferError("gRPC doesn't hand it over") from error
    assert peer_from_pb(message).name == message.name


class _Failed(grpc.RpcError, grpc.Call):
    """A call that the other side ended with these words."""

    def __init__(self, code: int, details: str, trailing: dict[str, str | bytes]) -> None:
        codes: list[grpc.StatusCode] = [*grpc.StatusCode]
        self._code, self._details, self._trailing = codes[code % len(codes)], details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return tuple(self._trailing.items())


def status(data: bytes) -> None:
    """A number of a status, and behind it, with zero bytes between them: details, kind of error, peer, hint."""
    details, kind, peer, hint, *_ = [*data[1:].split(b"\0"), b"", b"", b"", b""]
    trailing: dict[str, str | bytes] = {"tensorlink-error": kind.decode("latin-1")}
    trailing |= {"tensorlink-peer-bin": peer, "tensorlink-hint-bin": hint}
    call = _Failed(data[0] if data else 0, details.decode(errors="replace"), trailing)
    str(error_of(call, phase="call", peer="peer"))
    with suppress(AuthenticationError):
        check_token("token", [("tensorlink-token-bin", peer)])
    with suppress(ValueError):
        assert check_name(hint.decode(errors="replace")).isprintable()


def meta(data: bytes) -> None:
    for use in (
        lambda: _core.unpack(data, PAYLOAD, copy=True),
        lambda: _core.unpack(data, PAYLOAD, copy=False),
        lambda: _core.unpack(data, PAYLOAD, like="numpy", copy=False),
        lambda: _core.describe(data),
        lambda: _core.fill(data, PAYLOAD, {"a": np.zeros(4, "f4")}),
        lambda: _core.meta_frameworks(data),
    ):
        try:
            use()
        except CorruptTransferError:
            continue
        except (ValueError, TypeError) as error:  # it is well-formed, and of what doesn't fit `out` or no framework has
            assert "out" in str(error) or "dtype" in str(error), repr(error)


PARSERS: dict[str, Callable[[bytes], None]] = {
    "address": address,
    "flight": flight,
    "handle": handle,
    "meta": meta,
    "peer": peer,
    "status": status,
}


def attempt(name: str, data: bytes) -> None:
    """Raises: whatever the parser must not."""
    with suppress(CorruptTransferError):
        PARSERS[name](data)
