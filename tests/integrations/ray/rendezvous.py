"""The actor that runs the coordinator: it dies, its node dies, its driver ends, and its peers go on; without any it goes too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tensorlink.integrations.ray import rendezvous
from tests.control.control_processes import eventually
from tests.integrations.ray.clusters import ROOT, SMALL, ray_folder, weight_sync
from tests.integrations.ray.members import Member

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
strategies = pytest.importorskip("ray.util.scheduling_strategies")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:FutureWarning:ray.*")
NAMESPACE = "tests"
FAST = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes: a head, to which this process belongs, and another one."""
    with ray_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        made = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "_system_config": FAST, "labels": {"role": "trainer"}, **SMALL},
        )
        made.add_node(num_cpus=2, resources={"second": 1}, labels={"role": "rollout"}, **SMALL)
        ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
        assert ray.get_runtime_context().get_node_id() == made.head_node.node_id
        # From now on the head's raylet knows the second node, and places there what would be soft.
        second = ray.remote(num_cpus=0, resources={"second": 0.1})(node_of)
        assert [ray.get(second.remote(None))] == [node.node_id for node in made.worker_nodes]
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def coordinator(cluster: Any) -> Any:
    """The actor."""
    return rendezvous.start(tl.Settings(lease_s=2.0))


def named() -> list[dict[str, str]]:
    found: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return [row for row in found if row["namespace"] == f"tensorlink:{NAMESPACE}"]


@pytest.fixture
def start(coordinator: Any) -> Iterator[Callable[..., Any]]:
    started: list[Any] = []

    def actor(**options: Any) -> Any:
        started.append(ray.remote(Member).options(num_cpus=0, **options).remote())
        return started[-1]

    yield actor
    for handle in started:
        ray.kill(handle)


@pytest.fixture
def driver(coordinator: Any) -> Iterator[tl.Endpoint]:
    with tl.init() as endpoint:
        yield endpoint


def head() -> Any:
    return strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def node_of(actor: Any) -> Any:
    return ray.get_runtime_context().get_node_id()


def process_of(actor: Any) -> int:
    return os.getpid()


def exchange(driver: tl.Endpoint, actor: Any) -> None:
    driver.send(np.arange(3), ray.get(actor.me.remote()).name)
    assert ray.get(actor.recv.remote(driver.name)) == [0, 1, 2]


def place(coordinator: Any) -> str:
    while True:
        try:
            found: str = ray.get(coordinator.place.remote()).coordinator
            return found
        except ray.exceptions.ActorUnavailableError:
            continue


def test_two_nodes(start: Callable[..., Any], driver: tl.Endpoint) -> None:
    one, other = start(scheduling_strategy=head()), start(resources={"second": 0.1})
    names = [ray.get(actor.me.remote()).name for actor in (one, other)]
    one.send.remote(names[1], 5)
    assert ray.get(other.recv.remote(names[0])) == [5, 5, 5]
    assert ray.get(one.get.remote(nested=other.put.remote(100_000))) == sum(range(100_000))
    tokens = {driver.settings.token, *ray.get([one.token.remote(), other.token.remote()])}
    assert len(tokens) == 1 and len(tokens.pop() or "") == 64


@pytest.mark.parametrize("for_good", [False, True], ids=["crashed", "removed by a user"])
def test_the_actor_that_dies_is_replaced(
    coordinator: Any, start: Callable[..., Any], driver: tl.Endpoint, for_good: bool
) -> None:
    actor = start(name="early")
    before, me = place(coordinator), (driver.id, ray.get(actor.me.remote()))
    ray.kill(coordinator, no_restart=for_good)
    late = start(name="late")
    exchange(driver, late)
    eventually(lambda: {driver.name, "early", "late"} == ray.get(late.peers.remote()), "all have joined again")
    exchange(driver, actor)
    assert me == (driver.id, ray.get(actor.me.remote()))
    assert place(rendezvous.start(tl.Settings())) != before


def test_two_drivers_of_one_namespace(driver: tl.Endpoint, cluster: Any) -> None:
    out = run_driver("alone", cluster, namespace=NAMESPACE)
    assert re.fullmatch(r"\['driver-\w{8}', 'driver-\w{8}'\]", out) and driver.name in out


def test_other_namespaces_are_apart(driver: tl.Endpoint, cluster: Any, tmp_path: Path) -> None:
    """Those of Ray, which another driver gives, and those of TensorLink."""
    out = run_driver("alone", cluster, namespace="another")
    assert re.fullmatch(r"\['driver-\w{8}'\]", out) and driver.name not in out
    with tl.init("mine", namespace="mine") as mine:
        assert [peer.name for peer in mine.peers()] == ["mine"]


def test_the_driver_that_began_it_may_end(cluster: Any) -> None:
    """Another one finds the detached actor that it left, and its peer."""
    out = run_driver("begin", cluster, namespace=NAMESPACE)
    assert out == "begun"
    actor = ray.get_actor("kept")
    with tl.init() as driver:
        exchange(driver, actor)
        eventually(lambda: ray.get(actor.peers.remote()) == {driver.name, "kept"}, "the first driver is gone")
    ray.kill(actor)
    eventually(lambda: not named(), "the coordinator's actor has gone after its last peer")


DRIVER = """
import sys, ray, tensorlink as tl
from tests.integrations.ray.members import Member
ray.init(address=sys.argv[2], namespace=sys.argv[3], log_to_driver=False)
if sys.argv[1] == "alone":
    print(sorted(peer.name for peer in tl.init().peers()))
else:
    tl.init("first")
    kept = ray.remote(Member).options(name="kept", lifetime="detached", num_cpus=0).remote()
    tl.send([1], ray.get(kept.me.remote()).name)
    print("begun")
"""


def run_driver(do: str, cluster: Any, namespace: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, do, cluster.address, namespace],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_example_of_weights_by_the_roles_of_nodes(cluster: Any, tmp_path: Path) -> None:
    """Its only worker is killed, so that the steps after that are all of the one which Ray started again."""
    result = weight_sync(tmp_path, cluster.address, "--workers=1", "--steps=8", "--kill-worker=3")
    (second,) = cluster.worker_nodes
    series = result["series"]
    assert series["places"][-1] == {
        "trainer": f"node {cluster.head_node.node_id[:8]}, role trainer",
        "worker-0": f"node {second.node_id[:8]}, role rollout",
    }
    assert result["summary"]["restarts"] == 1 and series["step"] == list(range(1, 9))
    assert series["workers"] == [["worker-0"]] * 8
    assert series["versions"][-1][0] >= 7


@pytest.fixture
def far_coordinator(cluster: Any) -> Any:
    """The actor on the second node. Ray may place on the head's what may be anywhere, so until it is there."""
    (node,) = cluster.worker_nodes
    there = strategies.NodeAffinitySchedulingStrategy(node.node_id, soft=True)

    def placed() -> Any:
        actor = rendezvous.start(tl.Settings(lease_s=2.0), scheduling_strategy=there)
        if ray.get(actor.__ray_call__.remote(node_of)) == node.node_id:
            return actor
        ray.kill(actor)
        eventually(lambda: not named(), "the name is free")
        return None

    return eventually(placed, "it is on the second node")


def test_the_end_of_its_node(
    far_coordinator: Any, start: Callable[..., Any], driver: tl.Endpoint, cluster: Any
) -> None:
    """Ray starts it elsewhere; those of the other node go on, under the incarnations they have."""
    actor = start(name="stays", scheduling_strategy=head())
    lost = start(name="lost", resources={"second": 0.1})
    me = driver.id, ray.get(actor.me.remote())
    eventually(lambda: ray.get(lost.peers.remote()) == {driver.name, "stays", "lost"}, "all have met")
    before = place(far_coordinator)
    (node,) = cluster.worker_nodes
    assert ray.get(far_coordinator.__ray_call__.remote(node_of)) == node.node_id
    cluster.remove_node(node, allow_graceful=False)
    exchange(driver, actor)
    eventually(lambda: place(far_coordinator) != before, "Ray has started it on the other node")
    late = start(name="late", scheduling_strategy=head())
    exchange(driver, late)
    eventually(lambda: ray.get(late.peers.remote()) == {driver.name, "stays", "late"}, "who is there is known again")
    assert me == (driver.id, ray.get(actor.me.remote()))


def test_the_end_of_ray_ends_the_endpoint(cluster: Any) -> None:
    """The last test of the module. Nothing else of Ray may be started by what looks for a coordinator."""
    endpoint = tl.init()
    coordinator = rendezvous.start(tl.Settings())
    process = ray.get(coordinator.__ray_call__.remote(process_of))
    ray.shutdown()
    os.kill(process, signal.SIGKILL)
    eventually(lambda: endpoint.closed, "the endpoint is closed")
    assert not ray.is_initialized()
    with pytest.raises(tl.ClosedError):
        endpoint.put(np.arange(3))
