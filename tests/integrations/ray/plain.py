"""Drivers, actors and tasks of Ray are peers with no arguments, and handles and errors pass through Ray as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.control.control_processes import eventually
from tests.integrations.ray.clusters import SMALL, ray_folder, weight_sync
from tests.integrations.ray.members import AsyncMember, Member

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:FutureWarning:ray.*")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_folder() as folder:
        ray.init(num_cpus=2, _temp_dir=str(folder), log_to_driver=False, labels={"rack": "r1"}, **SMALL)
        yield
        ray.shutdown()


@pytest.fixture
def driver() -> Iterator[tl.Endpoint]:
    with tl.init() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def member() -> Iterator[Any]:
    """An actor with a name that may be restarted."""
    actor = ray.remote(Member).options(num_cpus=0, name="member", max_restarts=-1).remote()
    yield actor
    ray.kill(actor)


def test_driver_and_actor_meet(driver: tl.Endpoint, member: Any) -> None:
    assert driver.name == f"driver-{ray.get_runtime_context().get_job_id()}"
    assert ray.get(member.me.remote()).name == "member"
    driver.send(np.arange(3), "member")
    assert ray.get(member.recv.remote(driver.name)) == [0, 1, 2]
    ray.get(member.send.remote(driver.name, 7))
    assert driver.recv("member").tolist() == [7, 7, 7]


def test_names_of_those_that_nobody_named(driver: tl.Endpoint) -> None:
    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def rollout() -> str:
        first, second = tl.init(), tl.init()
        assert first is second
        return first.name

    actor = ray.remote(Member).options(num_cpus=0).remote()
    name = ray.get(actor.me.remote()).name
    assert name == f"Member-{actor._actor_id.hex()[:8]}"
    assert ray.get(actor.again.remote()).name == name
    assert ray.get(rollout.remote()).startswith("rollout-")


def test_labels_of_the_node_and_of_the_user(driver: tl.Endpoint, member: Any) -> None:
    assert ray.get(member.labels.remote())["rack"] == "r1"
    with tl.init("labelled", labels={"rack": "mine"}) as other:
        labels = next(peer.labels for peer in other.peers() if peer.name == "labelled")
    assert labels["rack"] == "mine" and labels["ray.io/node-id"] == ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize("count", [10, 100_000])
def test_handles_pass_through_ray_wherever_they_are(driver: tl.Endpoint, member: Any, count: int) -> None:
    wanted = sum(range(count))
    nested = member.put.remote(count)
    assert driver.get(ray.get(nested)["deep"][0]).sum() == wanted
    assert ray.get(member.get.remote(driver.put(np.arange(count)))) == wanted
    assert ray.get(member.get.remote(ref=driver.put(np.arange(count)))) == wanted
    assert ray.get(member.get.remote(nested={"deep": (driver.put(np.arange(count)),)})) == wanted
    assert ray.get(member.get.remote(nested=nested)) == wanted  # its own, through Ray's object store


def test_handles_are_awaited_in_an_async_actor(driver: tl.Endpoint, member: Any) -> None:
    other = ray.remote(AsyncMember).options(num_cpus=0).remote()
    refs = [driver.put(np.arange(1000)), ray.get(member.put.remote(100_000))["deep"][0]]
    assert ray.get(other.sums.remote(refs)) == [sum(range(1000)), sum(range(100_000))]


FIELDS = {"peer": "x", "transport": "tcp", "phase": "read", "hint": "Do this"}
ERRORS = sorted(name for name in tl.__all__ if name.endswith("Error"))
MORE: dict[str, dict[str, Any]] = {"TransferTimeoutError": {"waited": "for long"}, "TransportError": {"code": 5}}


def test_errors_keep_their_class_and_fields(driver: tl.Endpoint, member: Any) -> None:
    for name in ERRORS:
        fields = {**FIELDS, **MORE.get(name, {})}
        with pytest.raises(getattr(tl, name)) as caught:
            ray.get(member.fail.remote(name, fields))
        assert isinstance(caught.value, ray.exceptions.RayTaskError)
        assert {field: getattr(caught.value, field) for field in fields} == fields
        assert caught.value.message == "it failed" and "Do this" in str(caught.value)


def test_an_error_of_a_real_failure(driver: tl.Endpoint, member: Any) -> None:
    with pytest.raises(tl.TransferTimeoutError) as caught:
        ray.get(member.recv.remote(driver.name, timeout=0.05))
    assert caught.value.peer == driver.name and caught.value.waited


def test_a_restarted_actor_comes_back_under_its_name(driver: tl.Endpoint, member: Any) -> None:
    before = ray.get(member.me.remote())
    ref = ray.get(member.put.remote(100_000))["deep"][0]
    waiting = driver.irecv("member")
    ray.kill(member, no_restart=False)
    with pytest.raises(tl.PeerLostError):
        waiting.wait(20)
    eventually(lambda: _answers(member), "Ray has restarted the actor")
    driver.send(np.arange(3), "member")
    assert ray.get(member.recv.remote(driver.name)) == [0, 1, 2]
    after = ray.get(member.me.remote())
    assert after.name == before.name and after.incarnation > before.incarnation
    with pytest.raises(tl.PeerRestartedError):
        driver.get(ref)


def _answers(actor: Any) -> bool:
    try:
        return bool(ray.get(actor.pid.remote()))
    except ray.exceptions.RayActorError:
        return False


def test_without_ray_where_the_user_says_so(driver: tl.Endpoint) -> None:
    with tl.init(rendezvous="none") as alone:
        assert alone.settings.coordinator is None and alone.name != driver.name
        assert [peer.name for peer in alone.peers()] == [alone.name]
    with pytest.raises(ValueError, match="doesn't run in torchrun"):
        tl.init(rendezvous="torchrun")


def test_ray_comes_before_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"}
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    with tl.init() as endpoint:
        assert endpoint.name.startswith("driver-")


def test_the_example_of_weights_where_no_node_has_a_role(tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    series = weight_sync(tmp_path, address, "--workers=1", "--steps=2")["series"]
    here = f"node {ray.get_runtime_context().get_node_id()[:8]}, role any"
    assert series["places"][-1] == {"trainer": here, "worker-0": here}
    assert series["workers"] == [["worker-0"]] * 2
