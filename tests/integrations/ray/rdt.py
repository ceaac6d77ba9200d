"""TensorLink as a tensor transport of a real Ray: values, lifetimes, and what deaths do to whom."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

from ray.experimental import set_target_for_ref  # noqa: E402

import tensorlink as tl  # noqa: E402
from tensorlink.integrations.ray import devices, endpoint, register, serializer, transport  # noqa: E402
from tests import leaks  # noqa: E402
from tests.integrations.ray import actors  # noqa: E402
from tests.integrations.ray.actors import Actor  # noqa: E402
from tests.integrations.ray.kills import Kills, brief_driver, state_of  # noqa: E402
from tests.peer import eventually  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore:`ray.worker.global_worker` is a private attribute:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:RDT ObjectRef.*passed back to the actor that created it:UserWarning"),
]

OBJECT = "0" * 56


@pytest.fixture(scope="module")
def a(cluster: None) -> Any:
    return Actor.remote()


@pytest.fixture(scope="module")
def b(cluster: None) -> Any:
    return Actor.remote()


@pytest.fixture(scope="module")
def owner(cluster: None) -> Any:
    """One that dies again and again, and is restarted; tests connect to it anew."""
    return Actor.options(max_restarts=-1, max_task_retries=-1).remote()


@pytest.fixture(autouse=True)
def _let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("a", "b", "owner"):
        request.node.funcargs.pop(name, None)
    gc.collect()


def on(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in an actor."""
    return ray.get(actor.call.remote(function, *args), timeout=60)


def name_of(actor: Any) -> str:
    return f"Actor-{actor._actor_id.hex()[:8]}"


def is_empty(actor: Any) -> None:
    gc.collect()
    eventually(lambda: on(actor, actors.pool)["used_bytes"] == 0, "the owner's pool is empty")
    assert on(actor, actors.stored) == 0


# Values


def test_every_way_to_ask_for_it(a: Any, b: Any) -> None:
    wanted = float(actors.ranged(100_000).sum())
    by_method = a.make.remote(actors.ranged, 100_000)
    by_option = a.call.options(tensor_transport="tensorlink").remote(actors.ranged, 100_000)
    by_put = ray.put(actors.ranged(100_000), _tensor_transport="tensorlink")
    (put_by_actor,) = on(a, actors.put, actors.ranged, 100_000)
    for ref in (by_method, by_option, by_put, put_by_actor):
        assert ray.get(b.total.remote(ref), timeout=60) == wanted
        assert float(ray.get(ref).sum()) == wanted
    assert ray.get(a.total.remote(by_method)) == wanted, "back to where it came from"
    assert ray.get(b.total.remote({"inside": [ray.get(by_put)]})) == wanted


def test_tensors_that_are_not_plain(a: Any, b: Any) -> None:
    for got in (ray.get(a.make.remote(actors.odd)), on(b, lambda value: value, a.make.remote(actors.odd))):
        for name, tensor in actors.odd().items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor.detach()), name


def test_thousands_of_tensors_and_an_alias(a: Any, b: Any) -> None:
    ref = a.make.remote(actors.many, 3000)
    got = ray.get(ref)
    assert [float(got[f"layer.{i}"][0, 0]) for i in range(3000)] == list(range(3000))
    assert got["tied"].data_ptr() == got["layer.1"].data_ptr()
    assert ray.get(b.total.remote(ref)) == 64 * (sum(range(3000)) + 1)


def test_values_without_tensors(a: Any, b: Any) -> None:
    ref = a.make.remote(actors.tensors_in, [1, "two"])
    assert ray.get(ref) == []
    assert ray.get(b.total.remote(ref)) == 0


def test_what_is_returned_is_a_snapshot(a: Any, b: Any) -> None:
    ref = a.make.remote(actors.keep, torch.zeros(100_000))
    assert ray.get(b.total.remote(ref)) == 0
    on(a, actors.add_to_kept, 1)
    assert ray.get(b.total.remote(ref)) == 0, "a change of the source reached a reader"
    ray.get(ref).fill_(7)
    assert float(ray.get(ref).sum()) == 0, "a change by one reader reached another"


def test_targets_are_filled_in_place(a: Any) -> None:
    ref = a.make.remote(actors.ranged, 100_000)
    target = torch.zeros(100_000, dtype=torch.float64)
    set_target_for_ref(ref, [target])
    assert ray.get(ref) is target
    assert float(target.sum()) == float(actors.ranged(100_000).sum())


def test_gets_in_any_order_and_again(a: Any) -> None:
    refs = [a.make.remote(torch.full, (20_000,), float(i)) for i in range(6)]
    assert [float(t[0]) for t in ray.get(refs[::-1] + refs[:3])] == [5, 4, 3, 2, 1, 0, 0, 1, 2]
    assert float(ray.get(refs[3])[0]) == float(ray.get(refs[3])[0]) == 3


def test_handles_go_where_ray_moves_nothing(a: Any, b: Any) -> None:
    """As a keyword argument, for instance; and nested in what Ray makes no difference of."""
    handle = on(a, lambda: endpoint().put(actors.ranged(50_000), reads=1))
    assert len(ray.cloudpickle.dumps(handle)) < 512, "it takes code along"
    got = ray.get(b.call.remote(lambda where: float(endpoint().get(where["x"]).sum()), {"x": handle}))
    assert got == float(actors.ranged(50_000).sum())
    is_empty(a)


# Lifetimes


def test_the_pool_is_empty_once_refs_are_gone(a: Any, b: Any) -> None:
    before = on(b, actors.stored)
    refs = [a.make.remote(actors.ranged, 50_000) for _ in range(5)]
    held = ray.get(refs[0])
    ray.get([b.total.remote(*refs), b.total.remote(refs[0], refs[0])])
    assert on(a, actors.pool)["handles"] >= 5
    del refs
    eventually(lambda: on(a, actors.pool)["handles"] == 0, "Ray has said that all are gone")
    assert float(held.sum()) == float(actors.ranged(50_000).sum()), "what a reader has stays"
    del held
    is_empty(a)
    assert on(b, actors.stored) == before


def test_metadata_is_the_same_when_ray_retries(a: Any) -> None:
    def twice() -> tuple[bool, int, int]:
        made = transport.TensorLinkTransport()
        tensors = [torch.ones(50_000)]
        before = actors.pool()["handles"]
        first, second = (made.extract_tensor_transport_metadata(OBJECT, tensors) for _ in range(2))
        handles = actors.pool()["handles"] - before
        made.garbage_collect(OBJECT, first, tensors)
        made.garbage_collect(OBJECT, first, tensors)
        return first == second, handles, actors.pool()["handles"] - before

    assert on(a, twice) == (True, 1, 0)


def test_errors_of_the_method_and_of_its_tensors(a: Any, b: Any) -> None:
    pid = on(a, actors.pid)
    for make, error in ((actors.fail, KeyError), (lambda: torch.ones(3).to_sparse(), TypeError)):
        ref = a.make.remote(make)
        with pytest.raises(error):
            ray.get(ref)
        with pytest.raises(error):
            ray.get(b.total.remote(ref))
    assert on(a, actors.pid) == pid
    is_empty(a)


def test_other_values_are_serialized_as_before(a: Any) -> None:
    """Ray's own reducer for tensors pickles them twice once a process has used a tensor transport."""
    keep = ray.put(torch.ones(3), _tensor_transport="tensorlink")
    serializer.confine()
    context = ray._private.worker.global_worker.get_serialization_context()
    tensor = torch.ones(1000)
    assert len(context.serialize(tensor).to_bytes()) < 5000
    assert ray.cloudpickle.CloudPickler.dispatch[torch.Tensor](tensor)[0] is tensor.__reduce_ex__(5)[0]
    assert torch.equal(ray.get(ray.put(tensor)), tensor)
    del keep


def test_registering_again_is_nothing() -> None:
    register()
    register()
    assert ray.experimental.rdt.util.is_one_sided_transport("TENSORLINK")


# Deaths

GONE = (tl.PeerLostError, tl.TransferTimeoutError)


def test_a_stopped_owner_costs_one_limit_and_fences_the_rest(b: Any, owner: Any) -> None:
    refs = [owner.make.remote(actors.ranged, 50_000) for _ in range(3)]
    pid = on(owner, actors.pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        waiting = [b.total.remote(ref) for ref in refs]  # one after another, on one thread
        ours = [_Fetch(ref) for ref in refs]
        with pytest.raises(tl.TransferTimeoutError) as caught:
            ours[0].wait(timeout=0.2)
        assert caught.value.peer.startswith(name_of(owner))
        for fetch in ours:
            with pytest.raises(tl.TransferCancelledError):
                fetch.request.transfer.result()
        for ref in waiting:
            with pytest.raises(GONE) as caught:
                ray.get(ref)
            assert caught.value.peer.startswith(name_of(owner))
        assert time.monotonic() - begin < 2 * transport.LIMIT_S, "each waited for its own limit"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get([b.total.remote(ref) for ref in refs]) == [float(actors.ranged(50_000).sum())] * 3


def test_a_dead_owner_is_named(b: Any, owner: Any) -> None:
    ref, pid = owner.make.remote(actors.ranged, 50_000), on(b, actors.pid)
    ray.wait([ref])
    os.kill(on(owner, actors.pid), signal.SIGKILL)
    eventually(lambda: not on(b, actors.knows, name_of(owner)) and not actors.knows(name_of(owner)), "all have noticed")
    for get in (lambda: ray.get(b.total.remote(ref)), lambda: ray.get(ref)):
        with pytest.raises(tl.PeerLostError) as caught:
            get()
        assert caught.value.peer.startswith(name_of(owner))
        assert caught.value.hint
    assert on(b, actors.pid) == pid


def test_an_owner_that_is_killed_while_it_is_asked_and_its_successor(b: Any, owner: Any) -> None:
    ref = owner.make.remote(actors.ranged, 50_000)
    on(owner, actors.arm, "handshake.heard:kill")
    with pytest.raises(tl.PeerLostError) as caught:
        ray.get(b.total.remote(ref))
    assert caught.value.peer.startswith(name_of(owner))
    again = owner.make.remote(actors.ranged, 50_000)  # the new process has registered the transport, by the hook
    assert ray.get(b.total.remote(again)) == float(ray.get(again).sum()) == float(actors.ranged(50_000).sum())
    with pytest.raises(tl.PeerRestartedError):
        ray.get(b.total.remote(ref))


def test_what_was_received_outlives_its_owner() -> None:
    owner = Actor.remote()
    got = ray.get(owner.make.remote(actors.ranged, 50_000))
    ray.kill(owner)
    with pytest.raises(ray.exceptions.ActorDiedError):
        on(owner, actors.pid)
    assert float(got.sum()) == float(actors.ranged(50_000).sum())


def test_a_reader_that_is_killed_takes_nobody_along(a: Any) -> None:
    pid, reader = on(a, actors.pid), Actor.remote()
    ref = a.make.remote(actors.ranged, 50_000)
    on(reader, actors.arm, "hold.taken:kill")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(reader.total.remote(ref))
    assert on(a, actors.pid) == pid
    assert float(ray.get(ref).sum()) == float(actors.ranged(50_000).sum())
    del ref
    is_empty(a)


def test_an_owner_that_is_killed_while_it_is_read(owner: Any) -> None:
    """On this host the reader has its hold by then, and may have the value still; its error names the owner."""
    reader, name = Actor.remote(), name_of(owner)
    ref, owner_pid, pid = owner.make.remote(actors.ranged, 50_000), on(owner, actors.pid), on(reader, actors.pid)
    on(reader, actors.arm, "hold.taken:stop")
    reading = reader.total.remote(ref)
    eventually(lambda: state_of(pid) == "T", "it stands in the middle of its read")
    os.kill(owner_pid, signal.SIGKILL)
    eventually(lambda: not leaks.alive(owner_pid), "the owner is dead")
    os.kill(pid, signal.SIGCONT)
    try:
        assert ray.get(reading) == float(actors.ranged(50_000).sum())
    except tl.PeerLostError as error:
        assert error.peer.startswith(name)
    assert on(reader, actors.pid) == pid


def test_an_owner_that_is_killed_while_it_sends_to_another_host() -> None:
    """As between hosts: by TCP alone."""
    far = Actor.options(runtime_env={"env_vars": {"TENSORLINK_TRANSPORTS": "tcp"}})
    owner, reader = far.remote(), far.remote()
    ref, pid = owner.make.remote(actors.ranged, 4 << 20), on(reader, actors.pid)
    ray.wait([ref])
    on(owner, actors.arm, "served.part:kill")
    with pytest.raises(tl.PeerLostError) as caught:
        ray.get(reader.total.remote(ref))
    assert caught.value.peer.startswith(name_of(owner)) and caught.value.transport == "tcp"
    assert on(reader, actors.pid) == pid


def test_the_owner_of_a_reference_dies(a: Any, b: Any) -> None:
    """What an actor has put and lent is gone with it, and Ray says so as for any value; those who have read it go on."""
    owner, pids = Actor.remote(), (on(a, actors.pid), on(b, actors.pid))
    (ref,) = on(owner, actors.put, actors.ranged, 50_000)
    got, name = ray.get(ref), name_of(owner)
    assert ray.get(b.total.remote(ref)) == float(got.sum())
    ray.kill(owner)
    eventually(lambda: not on(b, actors.knows, name) and not actors.knows(name), "all have noticed")
    for get in (lambda: ray.get(ref, timeout=60), lambda: ray.get(b.total.remote(ref), timeout=60)):
        with pytest.raises((ray.exceptions.OwnerDiedError, tl.PeerLostError)):
            get()
    assert float(got.sum()) == float(actors.ranged(50_000).sum())
    assert (on(a, actors.pid), on(b, actors.pid)) == pids
    assert ray.get(b.total.remote(a.make.remote(actors.ranged, 10))) == 45


def test_a_driver_that_exits_in_the_middle() -> None:
    """Its own actors go with it; one that was lent to it stays, and serves others."""
    lent = Actor.options(name="lent", lifetime="detached").remote()
    pid = on(lent, actors.pid)
    done = brief_driver()
    assert done.stdout == f"{float(actors.ranged(50_000).sum())}\n", done.stdout + done.stderr
    eventually(lambda: not [p for p in endpoint().peers() if p.name.startswith("Reader-")], "its reader is gone")
    assert on(lent, actors.pid) == pid
    assert float(ray.get(lent.make.remote(actors.ranged, 50_000)).sum()) == float(actors.ranged(50_000).sum())
    ray.kill(lent)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_whoever_is_killed_at_any_time_is_the_only_one() -> None:
    kills = Kills(seed=int(os.environ.get("TENSORLINK_SEED", "1")))
    for _ in range(int(os.environ.get("TENSORLINK_RAY_KILLS", "8"))):
        kills.round()
    kills.close()
    assert kills.lost, "no kill met a value that somebody wanted"


class _Fetch:
    """What Ray does for one reference of a `ray.get`."""

    def __init__(self, ref: Any) -> None:
        meta = ray._private.worker.global_worker.rdt_manager.get_rdt_metadata(ref.hex())
        self._manager = ray.experimental.rdt.util.get_tensor_transport_manager("TENSORLINK")
        asked = self._manager.get_communicator_metadata(None, None)
        self.request = self._manager.fetch_multiple_tensors(ref.hex(), meta.tensor_transport_meta, asked)

    def wait(self, timeout: float) -> Any:
        return self._manager.wait_fetch_complete(self.request, timeout)


# The rest


def test_a_copy_of_tensors_of_any_device_lies_in_one_block() -> None:
    tensors = list(actors.odd().values())[:3] + [torch.zeros(0), torch.ones(70_000, dtype=torch.int16)]
    ref = devices.put_copied(endpoint(), tensors)
    assert endpoint().stats()["pool"]["blocks"] == 1
    assert all(torch.equal(one, other) for one, other in zip(endpoint().get(ref), tensors, strict=True))
    ref.release()


@pytest.mark.soak
def test_what_ray_never_moves(a: Any, b: Any) -> None:
    """Limits of Ray's that docs/ray.md tells of; if this fails, they are gone."""
    refs = [a.make.remote(actors.ranged, 10) for _ in range(2)]
    keyword = b.total.remote(also=refs[0])

    async def awaited() -> Any:
        return await refs[1]

    with pytest.raises(TimeoutError, match="not found in RDT object store"):
        asyncio.run(awaited())
    with pytest.raises(TimeoutError, match="not found in RDT object store"):
        ray.get(keyword)
    assert float(ray.get(refs[1]).sum()) == ray.get(b.total.remote(refs[0])) == 45
