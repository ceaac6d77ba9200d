"""The contract's second half: how connections begin and end, by close, abort and death."""

from __future__ import annotations

import json
import threading
import time
from base64 import b32encode, b64encode, b85encode, urlsafe_b64encode
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlink.errors import (
    ClosedError,
    CorruptTransferError,
    PeerLostError,
    PeerRestartedError,
    TensorLinkError,
    TransferTimeoutError,
)
from tensorlink.testing.data import GRACE_S, MIB, PAGE, Pairs, expected, few
from tensorlink.testing.pairs import Pair, Side, buffer_of, digest, eventually
from tensorlink.transports import registry
from tensorlink.transports.base import Connection, Transport
from tensorlink.types import Link, PeerId

ROUNDS = 200


def uses(side: Side, descriptor: bytes) -> list[Callable[[], object]]:
    """Every use of a connection that must fail once it has ended."""
    target = np.zeros(PAGE, np.uint8)
    connection = side.connection
    return [
        lambda: connection.expose([buffer_of(target)]),
        lambda: connection.fetch([(descriptor, buffer_of(target))]).wait(10),
        lambda: connection.map(descriptor, 10),
    ]


def shown(key: bytes) -> list[str]:
    """How a key could come into a text, in small letters: four bytes of it in hexadecimal, or all of it otherwise."""
    quads = [key[at : at + 4].hex() for at in range(len(key) - 3)]
    encoded = [encode(key).decode().rstrip("=") for encode in (b64encode, urlsafe_b64encode, b32encode, b85encode)]
    plain = [
        key.decode("latin-1"),
        repr(key)[2:-1],
        str(int.from_bytes(key, "big")),
        str(int.from_bytes(key, "little")),
    ]
    return [form.lower() for form in quads + encoded + plain]


class EndsContract(Pairs):
    # What a transport says of itself

    def test_it_is_what_is_registered(self, unconnected: Pair) -> None:
        assert type(unconnected.near.transport) is registry.load(self.transport)
        assert unconnected.near.transport.name == self.transport

    def test_links_are_values(self, unconnected: Pair) -> None:
        links = unconnected.near.transport.links()
        assert links
        for link in links:
            assert isinstance(link, Link)
            assert link.transport == self.transport
            assert link.reach in ("process", "host", "network")
            assert link.bytes_per_s > 0
            assert link.latency_s > 0
            assert hash(link) == hash(Link(**json.loads(json.dumps(vars(link)), object_hook=_tupled)))

    def test_an_address_is_constant_bytes(self, unconnected: Pair) -> None:
        address = unconnected.near.transport.address()
        assert isinstance(address, bytes)
        assert unconnected.near.transport.address() == address
        assert unconnected.far.facts()[1] != address

    def test_where_tells_no_secret(self, unconnected: Pair) -> None:
        """Nor does an error: both are shown to people, and written to logs."""
        transport, (peer, address, _) = unconnected.near.transport, unconnected.near.facts()
        said = [transport.where(address)]
        for end in range(len(address)):
            try:
                said.append(transport.where(address[:end]))
            except CorruptTransferError as error:
                said.append(f"{error} {error!r}")
        with pytest.raises(PeerRestartedError) as caught:
            unconnected.far.connect(PeerId(peer.name, peer.incarnation + 1), address)
        said.append(f"{caught.value} {caught.value!r}")
        for text in said:
            assert text.isprintable()
            assert not [form for form in shown(transport.site.key) if form in text.lower()], text

    def test_reaches_is_symmetric(self, unconnected: Pair) -> None:
        transport: Transport = unconnected.near.transport
        near, far = transport.address(), unconnected.far.facts()[1]
        assert transport.reaches(near, far) is None
        assert transport.reaches(far, near) is None
        assert transport.reaches(near, near) is None

    def test_garbage_is_no_address(self, unconnected: Pair) -> None:
        transport = unconnected.near.transport
        good = transport.address()

        @few
        @given(
            st.binary(max_size=60)
            | st.text(max_size=30).map(lambda s: json.dumps(s).encode())
            | st.integers(0, len(good) - 1).map(lambda n: good[:n])
            | st.sampled_from([b"[" * 100_000, b"null", b"{}", b'{"host":1e999}'])
        )
        def attempt(bad: bytes) -> None:
            with pytest.raises(CorruptTransferError):
                transport.reaches(good, bad)
            with pytest.raises(CorruptTransferError):
                transport.connect(PeerId("far", 1), bad, None, 1)

        attempt()

    # Connecting

    def test_a_connection_knows_its_peer(self, pair: Pair) -> None:
        connection = pair.near.connection
        assert isinstance(connection, Connection)
        assert connection.transport == self.transport
        assert connection.peer == pair.far.facts()[0]
        assert connection.up

    def test_a_stale_incarnation_is_told(self, unconnected: Pair) -> None:
        peer, address, _ = unconnected.far.facts()
        for other in (peer.incarnation - 1, peer.incarnation + 1):
            with pytest.raises(PeerRestartedError) as caught:
                unconnected.near.connect(PeerId(peer.name, other), address)
            assert caught.value.phase == "connect"
            assert caught.value.transport == self.transport
        unconnected.connect()

    def test_nobody_is_there(self, unconnected: Pair) -> None:
        peer, address, _ = unconnected.far.facts()
        unconnected.far.shutdown()
        with pytest.raises(PeerLostError):
            unconnected.near.connect(peer, address)

    def test_connect_ends_at_its_deadline(self, unconnected: Pair) -> None:
        if not self.pairs.separate:
            pytest.skip("the far side is this process")
        facts = unconnected.far.facts()
        start = time.monotonic()
        with unconnected.far_stopped(), pytest.raises(TransferTimeoutError):
            unconnected.near.connect(*facts[:2], 0.2)
        assert time.monotonic() - start < 0.2 + GRACE_S
        unconnected.connect()

    # Close and abort

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_use_after_the_end(self, pair: Pair, end: str) -> None:
        descriptors, mine = pair.far.expose(1, [PAGE]), pair.near.expose(1, [PAGE])
        getattr(pair.near, end)()
        assert not pair.near.connection.up
        for use in uses(pair.near, descriptors[0]):
            with pytest.raises(ClosedError):
                use()
        pair.near.connection.retract(mine)
        pair.near.close()
        pair.near.abort()

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_the_end_is_a_fence(self, pair: Pair, end: str) -> None:
        descriptors = pair.far.expose(1, [64 * MIB])
        target = np.zeros(64 * MIB, np.uint8)
        fetches = [pair.near.connection.fetch([(descriptors[0], buffer_of(target))]) for _ in range(3)]
        getattr(pair.near, end)()
        target.fill(7)
        for fetch in fetches:
            try:
                fetch.wait(10)
            except TensorLinkError:
                continue
        assert (target == 7).all()

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_a_view_outlives_the_connection(self, pair: Pair, end: str) -> None:
        descriptor = pair.far.expose(1, [16 * MIB])[0]
        number = pair.near.map(descriptor)
        if number is None:
            pytest.skip("this transport has no views")
        getattr(pair.near, end)()
        pair.far.retract([descriptor])
        pair.far.churn(50, 48 * MIB, 12)
        assert pair.near.show(number) == expected(1, [16 * MIB])[0]

    def test_it_connects_again(self, pair: Pair) -> None:
        for i in range(5):
            pair.near.close()
            pair.near.connect(*pair.far.facts()[:2])
            assert pair.near.fetch(pair.far.expose(i, [PAGE]), [PAGE]) == expected(i, [PAGE])

    def test_both_ends_close_at_once(self, pair: Pair) -> None:
        for i in range(ROUNDS):
            closing = threading.Thread(target=pair.near.close)
            closing.start()
            pair.far.close()
            closing.join(10)
            assert not closing.is_alive()
            pair.connect()
            if i % 20 == 0:
                assert pair.near.fetch(pair.far.expose(i, [PAGE]), [PAGE]) == expected(i, [PAGE])

    def test_close_races_with_map(self, pair: Pair) -> None:
        """A view that was given is good, even if the connection was being closed meanwhile."""
        for i in range(60):
            descriptor = pair.far.expose(i, [128 << 10])[0]
            closing = threading.Thread(target=pair.near.close)
            closing.start()
            try:
                number = pair.near.map(descriptor)
            except (ClosedError, PeerLostError):
                number = None
            closing.join()
            if number is not None:
                pair.far.retract([descriptor])
                pair.far.churn(1000 + i, 128 << 10, 2)
                assert pair.near.show(number) == expected(i, [128 << 10])[0]
            pair.near.drop_views()
            pair.connect()

    def test_the_transport_closes_its_connections(self, pair: Pair) -> None:
        descriptor = pair.far.expose(1, [PAGE])[0]
        pair.near.transport.close()
        pair.near.transport.close()
        for use in uses(pair.near, descriptor):
            with pytest.raises(ClosedError):
                use()
        with pytest.raises(ClosedError):
            pair.near.connect(*pair.far.facts()[:2])

    def test_nothing_leaks(self, pair: Pair) -> None:
        def once(i: int) -> None:
            pair.near.connect(*pair.far.facts()[:2])
            if i % 10 == 0:
                assert pair.near.fetch(pair.far.expose(i, [PAGE]), [PAGE]) == expected(i, [PAGE])
            pair.near.close()

        pair.near.close()
        once(0)
        before = settled(pair.near), settled(pair.far)
        for i in range(ROUNDS):
            once(i)
        for side, base in zip((pair.near, pair.far), before, strict=True):
            eventually(partial(no_more, side, base), f"descriptors, mappings and threads were {base} again")

    # Death of the peer

    @pytest.fixture
    def mortal(self, pair: Pair) -> Pair:
        if not self.pairs.separate:
            pytest.skip("the far side is this process")
        return pair

    def test_killed_before_connect(self, unconnected: Pair) -> None:
        if not self.pairs.separate:
            pytest.skip("the far side is this process")
        facts = unconnected.far.facts()
        unconnected.kill_far()
        with pytest.raises(PeerLostError):
            unconnected.near.connect(*facts[:2])

    def test_killed_while_connected(self, mortal: Pair) -> None:
        descriptor = mortal.far.expose(1, [PAGE])[0]
        mortal.kill_far()
        eventually(lambda: not mortal.near.connection.up, "the death was noticed", 5)
        for use in uses(mortal.near, descriptor):
            with pytest.raises(PeerLostError):
                use()
        mortal.near.close()
        mortal.near.abort()

    def test_killed_between_expose_and_fetch(self, mortal: Pair) -> None:
        descriptor = mortal.far.expose(1, [20 * MIB])[0]
        mortal.kill_far()
        with pytest.raises(PeerLostError):
            mortal.near.fetch([descriptor], [20 * MIB])

    def test_killed_during_a_fetch(self, mortal: Pair) -> None:
        descriptor = mortal.far.expose(1, [64 * MIB])[0]
        target = np.zeros(64 * MIB, np.uint8)
        fetch = mortal.near.connection.fetch([(descriptor, buffer_of(target))])
        mortal.kill_far()
        try:
            fetch.wait(10)
        except PeerLostError:
            target.fill(7)
            eventually(lambda: not mortal.near.connection.up, "the death was noticed", 5)
            assert (target == 7).all()
        else:
            assert digest(target) == expected(1, [64 * MIB])[0]

    def test_killed_while_a_view_is_held(self, mortal: Pair) -> None:
        number = mortal.near.map(mortal.far.expose(1, [16 * MIB])[0])
        if number is None:
            pytest.skip("this transport has no views")
        mortal.kill_far()
        eventually(lambda: not mortal.near.connection.up, "the death was noticed", 5)
        assert mortal.near.show(number) == expected(1, [16 * MIB])[0]
        mortal.near.close()
        assert mortal.near.show(number) == expected(1, [16 * MIB])[0]

    def test_a_killed_reader_gives_the_memory_back(self) -> None:
        if not self.pairs.separate:
            pytest.skip("the far side is this process")
        pair = self.pairs.pair(pool_bytes=64 * MIB)
        try:
            descriptors = pair.near.expose(1, [40 * MIB])
            pair.far.map(descriptors[0])
            pair.near.retract(descriptors)
            pair.kill_far()
            third = self.pairs.pair(connected=False)  # lives on, so that there is somebody to expose to
            pair.near.connect(*third.far.facts()[:2])
            eventually(lambda: pair.near.room(40 * MIB), "the memory came back", 5)
            third.close()
        finally:
            pair.close()


def _tupled(fields: dict[str, object]) -> dict[str, object]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def settled(side: Side) -> tuple[int, int, int]:
    """Resources of a side once they no longer change: ends of connections are noticed a little later."""
    last = side.resources()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        now = side.resources()
        if now != last:
            last, deadline = now, time.monotonic() + 0.5
    return last


def no_more(side: Side, base: tuple[int, int, int]) -> bool:
    """Whether a side has no more resources than `base`."""
    return all(now <= then for now, then in zip(side.resources(), base, strict=True))
