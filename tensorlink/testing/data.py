"""The contract's first half: the right bytes, only those, and only while they may come."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorlink import _core
from tensorlink.errors import (
    CorruptTransferError,
    LayoutMismatchError,
    StaleRefError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
)
from tensorlink.settings import memory_limit_bytes
from tensorlink.testing.pairs import Pair, PairMaker, buffer_of, digest, eventually, pattern, view_digest

PAGE = 4096
MIB = 1 << 20
GRACE_S = 2.0  # of a cancel: a second by the contract, and as much again for a busy machine
few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def expected(seed: int, sizes: list[int]) -> list[str]:
    """Digests of what `Side.expose` exposes."""
    return [digest(pattern(seed + i, nbytes)) for i, nbytes in enumerate(sizes)]


class Pairs:
    """What both halves need: a maker of pairs, and a pair for each test."""

    transport: ClassVar[str]
    """Name under which the transport is registered."""
    pairs: ClassVar[PairMaker]

    @classmethod
    def make_pairs(cls) -> PairMaker:
        """How pairs are made. Called once for the class."""
        raise NotImplementedError

    @classmethod
    def setup_class(cls) -> None:
        cls.pairs = cls.make_pairs()

    @classmethod
    def teardown_class(cls) -> None:
        cls.pairs.close()

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        made = self.pairs.pair()
        yield made
        made.close()

    @pytest.fixture
    def unconnected(self) -> Iterator[Pair]:
        made = self.pairs.pair(connected=False)
        yield made
        made.close()


class DataContract(Pairs):
    @pytest.mark.parametrize("pooled", [False, True], ids=["private", "pooled"])
    @pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 64 * MIB])
    def test_sizes(self, pair: Pair, nbytes: int, pooled: bool) -> None:
        descriptors = pair.far.expose(nbytes, [nbytes], pooled)
        assert pair.near.fetch(descriptors, [nbytes]) == expected(nbytes, [nbytes])

    @pytest.mark.soak
    def test_more_than_4_gib(self) -> None:
        nbytes = (4 << 30) + 4097
        if memory_limit_bytes() < 4 * nbytes:
            pytest.skip("this machine has less than 16 GiB of memory")
        pair = self.pairs.pair(pool_bytes=nbytes + 64 * MIB)
        try:
            descriptors = pair.far.expose(1, [nbytes])
            assert pair.near.fetch(descriptors, [nbytes], 60.0) == expected(1, [nbytes])
        finally:
            pair.close()

    def test_both_directions(self, pair: Pair) -> None:
        from_far, from_near = pair.far.expose(1, [100_000]), pair.near.expose(2, [100_000])
        assert pair.near.fetch(from_far, [100_000]) == expected(1, [100_000])
        assert pair.far.fetch(from_near, [100_000]) == expected(2, [100_000])

    def test_a_batch_of_many(self, pair: Pair) -> None:
        sizes = [(i * 37) % 3000 for i in range(1000)]
        descriptors = pair.far.expose(1, sizes)
        assert pair.near.fetch(descriptors, sizes) == expected(1, sizes)

    def test_a_batch_of_none(self, pair: Pair) -> None:
        assert pair.far.expose(1, []) == []
        pair.near.connection.fetch([]).wait(5)

    def test_several_fetches_at_once(self, pair: Pair) -> None:
        sizes = [random.Random(7).randrange(2 * MIB) for _ in range(24)]
        descriptors, want = pair.far.expose(1, sizes), expected(1, sizes)

        def read(i: int) -> bool:
            order = random.Random(i).sample(range(len(sizes)), len(sizes))
            return all(pair.near.fetch([descriptors[j]], [sizes[j]]) == [want[j]] for j in order)

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(read, range(6)))

    def test_a_larger_target_keeps_what_lies_behind(self, pair: Pair) -> None:
        target = np.full(PAGE + 100, 7, np.uint8)
        pair.near.connection.fetch([(pair.far.expose(1, [PAGE])[0], buffer_of(target))]).wait(10)
        assert digest(target[:PAGE]) == expected(1, [PAGE])[0]
        assert (target[PAGE:] == 7).all()

    def test_a_target_that_is_too_small_gets_no_byte(self, pair: Pair) -> None:
        first, second = np.full(PAGE, 7, np.uint8), np.full(PAGE - 1, 7, np.uint8)
        one, other = pair.far.expose(1, [PAGE, PAGE])
        with pytest.raises(LayoutMismatchError):
            pair.near.connection.fetch([(one, buffer_of(first)), (other, buffer_of(second))]).wait(10)
        assert (first == 7).all()
        assert (second == 7).all()

    # The end of what was exposed

    def test_retracted_is_stale(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [PAGE, PAGE])
        pair.far.retract(descriptors[:1])
        with pytest.raises(StaleRefError):
            pair.near.fetch(descriptors[:1], [PAGE])
        with pytest.raises(StaleRefError):
            pair.near.fetch(descriptors, [PAGE, PAGE])
        assert pair.near.fetch(descriptors[1:], [PAGE]) == expected(1, [PAGE, PAGE])[1:]

    def test_retract_twice(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [PAGE])
        pair.far.retract(descriptors)
        later = pair.far.expose(2, [PAGE])
        pair.far.retract(descriptors)
        assert pair.near.fetch(later, [PAGE]) == expected(2, [PAGE])

    def test_the_close_of_the_owner_retracts(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [PAGE])
        pair.far.close()
        with pytest.raises(TensorLinkError):
            pair.near.fetch(descriptors, [PAGE])

    def test_retracted_memory_is_used_again(self, pair: Pair) -> None:
        pair.far.churn(1, 48 * MIB, 20)

    # Cancel, timeout, fence

    def test_cancel_is_a_fence(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [32 * MIB])
        target = np.zeros(32 * MIB, np.uint8)
        for i in range(40):
            fetch = pair.near.connection.fetch([(descriptors[0], buffer_of(target))])
            until = time.perf_counter() + i * 0.0003
            while time.perf_counter() < until:
                pass
            start = time.monotonic()
            fetch.cancel()
            assert time.monotonic() - start < GRACE_S
            target.fill(7)
            if i % 8 == 0:  # the peer goes on, and what it does next arrives
                assert pair.near.fetch(pair.far.expose(i, [PAGE]), [PAGE]) == expected(i, [PAGE])
            assert (target == 7).all()
            fetch.cancel()

    def test_a_cancelled_fetch_says_so(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [64 * MIB])
        target = np.zeros(64 * MIB, np.uint8)
        fetch = pair.near.connection.fetch([(descriptors[0], buffer_of(target))])
        fetch.cancel()
        for _ in range(2):
            try:
                fetch.wait(5)
            except TransferCancelledError:
                continue
            assert digest(target) == expected(1, [64 * MIB])[0], "it was complete before the cancel"

    def test_a_cancel_after_the_end_changes_nothing(self, pair: Pair) -> None:
        target = np.zeros(PAGE, np.uint8)
        fetch = pair.near.connection.fetch([(pair.far.expose(1, [PAGE])[0], buffer_of(target))])
        fetch.wait(10)
        fetch.cancel()
        fetch.wait(10)
        assert digest(target) == expected(1, [PAGE])[0]

    def test_a_timeout_is_a_fence(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [64 * MIB])
        target = np.zeros(64 * MIB, np.uint8)
        fetch = pair.near.connection.fetch([(descriptors[0], buffer_of(target))])
        try:
            fetch.wait(0.0)
        except TransferTimeoutError:
            target.fill(7)
            assert pair.near.fetch(pair.far.expose(2, [PAGE]), [PAGE]) == expected(2, [PAGE])
            assert (target == 7).all()
        else:
            assert digest(target) == expected(1, [64 * MIB])[0]

    def test_a_stopped_peer_delays_no_one_beyond_the_deadline(self, pair: Pair) -> None:
        if not self.pairs.separate:
            pytest.skip("the far side is this process")
        descriptors = pair.far.expose(1, [20 * MIB])
        target = np.full(20 * MIB, 7, np.uint8)
        start = time.monotonic()
        with pair.far_stopped():
            fetch = pair.near.connection.fetch([(descriptors[0], buffer_of(target))])
            try:
                fetch.wait(0.3)
                complete = True
            except TransferTimeoutError:
                complete = False
            assert time.monotonic() - start < 0.3 + GRACE_S
        if not complete:
            target.fill(7)
        assert pair.near.fetch(descriptors, [20 * MIB]) == expected(1, [20 * MIB])
        assert digest(target) == expected(1, [20 * MIB])[0] if complete else (target == 7).all()

    # Descriptors that nobody gave out

    @pytest.mark.parametrize("bad", [b"", b"\0", b"\xff" * 16, b"\0" * 16, b"\xff" * 40, b"x" * 5000])
    def test_garbage_is_no_descriptor(self, pair: Pair, bad: bytes) -> None:
        with pytest.raises((CorruptTransferError, StaleRefError)):
            pair.near.fetch([bad], [PAGE])
        with pytest.raises((CorruptTransferError, StaleRefError)):
            pair.near.connection.open(bad, 10).addresses()

    def test_forged_descriptors(self, pair: Pair) -> None:
        real = pair.far.expose(1, [PAGE])[0]
        target = np.zeros(PAGE, np.uint8)

        def attempt(forged: bytes) -> None:
            try:
                pair.near.connection.fetch([(forged, buffer_of(target))]).wait(20)
                view = pair.near.connection.map(forged, 10)
            except TensorLinkError:
                return
            if view is not None and view.nbytes <= PAGE:
                view_digest(view)

        @few
        @given(st.binary(max_size=100))
        def with_random(data: bytes) -> None:
            attempt(data)

        @few
        @given(st.integers(0, len(real)), st.binary(min_size=1, max_size=8), st.integers(0, len(real) + 8))
        def with_patches(at: int, patch: bytes, length: int) -> None:
            attempt((real[:at] + patch + real[at + len(patch) :])[:length])

        with_random()
        with_patches()
        assert pair.near.fetch([real], [PAGE]) == expected(1, [PAGE])
        assert pair.far.fetch(pair.near.expose(5, [PAGE]), [PAGE]) == expected(5, [PAGE])

    def test_descriptors_are_values(self, pair: Pair) -> None:
        descriptors = pickle.loads(pickle.dumps(pair.far.expose(1, [PAGE])))
        assert all(isinstance(descriptor, bytes) for descriptor in descriptors)
        assert pair.near.fetch(descriptors, [PAGE]) == expected(1, [PAGE])

    # Views

    def mapped(self, pair: Pair, nbytes: int = 16 * MIB) -> tuple[int, bytes, str]:
        descriptor = pair.far.expose(1, [nbytes])[0]
        number = pair.near.map(descriptor)
        if number is None:
            pytest.skip("this transport has no views")
        return number, descriptor, expected(1, [nbytes])[0]

    def test_a_view_shows_the_bytes(self, pair: Pair) -> None:
        number, _, want = self.mapped(pair)
        assert pair.near.show(number) == want

    def test_a_view_of_retracted_memory_never_changes(self, pair: Pair) -> None:
        number, descriptor, want = self.mapped(pair)
        pair.far.retract([descriptor])
        with ThreadPoolExecutor(1) as pool:
            churning = pool.submit(pair.far.churn, 100, 16 * MIB, 40)  # more than the pool holds
            while not churning.done():
                assert pair.near.show(number) == want
            churning.result()
        assert pair.near.show(number) == want

    def test_dropped_views_give_the_memory_back(self) -> None:
        pair = self.pairs.pair(pool_bytes=64 * MIB)
        try:
            _, descriptor, _ = self.mapped(pair, 40 * MIB)
            pair.far.retract([descriptor])
            assert not pair.far.room(40 * MIB)
            pair.near.drop_views()
            # The owner's progress thread may be taking it back just now.
            eventually(lambda: pair.far.room(40 * MIB), "the memory is back")
        finally:
            pair.close()

    def test_a_retracted_one_cannot_be_mapped(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [PAGE])
        pair.far.retract(descriptors)
        with pytest.raises(StaleRefError):
            pair.near.connection.open(descriptors[0], 10).addresses()

    def test_a_written_torch_view_stays_private(self, pair: Pair) -> None:
        torch = pytest.importorskip("torch")
        number, descriptor, want = self.mapped(pair, 2 * MIB)
        del number
        pair.near.drop_views()
        meta = _core.pack(torch.zeros(2 * MIB, dtype=torch.uint8)).meta

        def unpack() -> Any:
            view = pair.near.connection.map(descriptor, 10.0)
            assert view is not None
            return view.unpack(meta, "torch")

        written, other = unpack(), unpack()
        written[:] = 99
        assert digest(other.numpy()) == want
        assert pair.near.fetch([descriptor], [2 * MIB]) == [want]
        del written
        assert digest(unpack().numpy()) == want, "what its reader wrote is gone with the view"
        pair.far.retract([descriptor])
        assert digest(other.numpy()) == want

    def test_readers_race_with_retract(self, pair: Pair) -> None:
        stop, torn = threading.Event(), []
        box: list[tuple[bytes, str]] = []

        def read() -> None:
            while not stop.is_set():
                if not box:
                    continue
                descriptor, want = box[-1]
                try:
                    target = np.zeros(256 << 10, np.uint8)
                    pair.near.connection.fetch([(descriptor, buffer_of(target))]).wait(20)
                except StaleRefError:
                    continue
                if digest(target) != want:
                    torn.append(descriptor)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for i in range(150):
            descriptors = pair.far.expose(i, [256 << 10])
            box.append((descriptors[0], expected(i, [256 << 10])[0]))
            pair.far.retract(descriptors)
        stop.set()
        for reader in readers:
            reader.join()
        assert not torn
