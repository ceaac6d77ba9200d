"""Weights in one process: what fits, what is copied, in which order, and what a failure leaves as it was."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorlink as tl
from tensorlink.endpoint import open_endpoint
from tests.conftest import make_runtime_dir
from tests.peer import eventually

CASES = Path(__file__).parents[1].parent / "shared" / "cases"
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def runtime_dir(_leaves_nothing: None) -> Iterator[Path]:
    """One coordinator for the module, kept alive by an endpoint that is nobody's current one."""
    folder = make_runtime_dir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        with open_endpoint("keeper", tl.Settings.load()):
            yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Iterator[tl.Endpoint]:
    with tl.init("trainer") as endpoint:
        yield endpoint
    tl.shutdown()
    request.node.funcargs.pop("trainer", None)  # pytest would keep it beyond the module's check for leaks


@pytest.fixture
def worker(request: pytest.FixtureRequest, trainer: tl.Endpoint) -> Iterator[tl.Endpoint]:
    with tl.init("worker") as endpoint:
        yield endpoint
    request.node.funcargs.pop("worker", None)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 4), value), "b": torch.full((4,), value, dtype=torch.bfloat16)}


def same(a: Any, b: Any) -> bool:
    return all(bool(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name]))) for name in a)


# Numbers


def test_versions_count_from_one_and_must_grow(trainer: tl.Endpoint) -> None:
    with tl.WeightPublisher("policy", state(0)) as publisher:
        assert [publisher.publish(), publisher.publish()] == [1, 2]
        assert publisher.publish(version=10) == 10
        assert publisher.publish() == 11
        for bad in (11, 3, -1, 1 << 64):
            with pytest.raises(ValueError, match="must grow"):
                publisher.publish(version=bad)
        assert publisher.version == 11


def test_a_step_may_be_zero(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(7))
    subscriber = tl.WeightSubscriber("policy", into=(into := state(0)), endpoint=worker)
    assert publisher.publish(version=0) == 0
    assert subscriber.pull() == 0 and same(into, state(7))


def test_pull_takes_the_newest_and_copies_it_once(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    live, into = state(1), state(0)
    publisher = tl.WeightPublisher("policy", live)
    subscriber = tl.WeightSubscriber("policy", into, endpoint=worker)
    assert subscriber.version is None
    publisher.publish()
    live["w"].fill_(2)
    publisher.publish()
    live["w"].fill_(3)  # not published
    assert subscriber.pull() == 2 == subscriber.version
    assert subscriber.publisher == trainer.id
    assert bool((into["w"] == 2).all()) and bool((into["b"] == 1).all())
    into["w"].fill_(9)
    assert subscriber.pull() == 2 and bool((into["w"] == 9).all())
    assert subscriber.stats()["pulls"] == 1 and subscriber.stats()["bytes"] >= 56
    assert publisher.stats()["publishes"] == 2 and publisher.stats()["kept_versions"] == 2


def test_min_version_is_waited_for(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", live := state(1))
    subscriber = tl.WeightSubscriber("policy", into := state(0), endpoint=worker)
    publisher.publish()
    assert subscriber.pull() == 1
    with pytest.raises(tl.TransferTimeoutError, match="version 2 or a newer one.*its newest is 1"):
        subscriber.pull(min_version=2, timeout=0.02)
    assert same(into, state(1)) and subscriber.version == 1
    transfer = subscriber.ipull(min_version=2, timeout=None)
    live["w"].fill_(2)
    publisher.publish(version=5)
    assert transfer.wait(20) == 5
    assert bool((into["w"] == 2).all())
    assert subscriber.pull(min_version=5, timeout=0) == 5


@pytest.mark.shm
def test_a_version_that_is_there_needs_no_time(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", state(0), endpoint=worker)
    publisher.publish()
    subscriber.pull()
    publisher.publish()
    assert subscriber.pull(timeout=0) == 2


# Waiting for somebody who is not there


def test_nobody_publishes(worker: tl.Endpoint) -> None:
    subscriber = tl.WeightSubscriber("polcy", state(0), endpoint=worker)
    with pytest.raises(tl.PeerUnknownError, match="nobody publishes weights 'polcy'"):
        subscriber.pull(timeout=0.05)


def test_nothing_published_yet(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", into := state(0), endpoint=worker)
    with pytest.raises(tl.TransferTimeoutError, match="there is none yet"):
        subscriber.pull(timeout=0.05)
    transfer = subscriber.ipull()
    publisher.publish()
    assert transfer.wait(20) == 1 and same(into, state(1))


def test_cancel_leaves_into_as_it_was(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", into := state(0), endpoint=worker)
    for transfer in (subscriber.ipull(timeout=None), subscriber.ipull(min_version=3, timeout=None)):
        assert transfer.cancel()
        with pytest.raises(tl.TransferCancelledError):
            transfer.result()
    assert same(into, state(0)) and subscriber.version is None
    publisher.publish()
    assert subscriber.pull() == 1 and same(into, state(1))


def test_a_pull_waits_for_the_one_before_it(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", state(0), endpoint=worker)
    publisher.publish()
    first = subscriber.ipull(min_version=2, timeout=None)
    second = subscriber.ipull(timeout=0.05)
    with pytest.raises(tl.TransferTimeoutError):
        second.wait(20)
    publisher.publish()
    assert first.wait(20) == 2 and subscriber.pull() == 2


# Names and lifetime


def test_one_publisher_a_name(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    first = tl.WeightPublisher("policy", state(1))
    for endpoint in (trainer, worker):
        with pytest.raises(tl.NameInUseError):
            tl.WeightPublisher("policy", state(1), endpoint=endpoint)
    tl.WeightPublisher("critic", state(1), endpoint=worker).close()
    first.close()
    first.close()
    tl.WeightPublisher("policy", state(1), endpoint=worker).close()
    for bad in ("", "x" * 121, "a\nb"):
        with pytest.raises(ValueError, match="name"):
            tl.WeightPublisher(bad, state(1))


def test_a_closed_publisher_is_told_of_and_replaced(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    subscriber = tl.WeightSubscriber("policy", into := state(0), endpoint=worker)
    with tl.WeightPublisher("policy", state(1)) as first:
        first.publish(version=5)
        subscriber.pull()
        first.publish(version=6)
    with pytest.raises(tl.ClosedError):
        first.publish()
    pull_until_lost(subscriber)
    assert same(into, state(1)) and subscriber.version in (5, 6)
    with tl.WeightPublisher("policy", state(2)) as second:  # of the same process: its numbers go on
        transfer = subscriber.ipull()
        assert second.publish() == 7
        assert transfer.wait(20) == 7 and same(into, state(2))
    pull_until_lost(subscriber)
    with tl.WeightPublisher("policy", state(3), endpoint=(other := tl.init("other"))) as third:
        third.publish(version=1)
        assert subscriber.pull() == 1 and same(into, state(3))
        other.shutdown()
    pull_until_lost(subscriber)


def pull_until_lost(subscriber: tl.WeightSubscriber) -> None:
    """The end of a publisher on another host is heard of a moment later."""
    with pytest.raises(tl.PeerLostError):
        while True:
            subscriber.pull()


def test_closing_frees_all_memory(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", state(0), endpoint=worker)
    for _ in range(5):
        publisher.publish()
        subscriber.pull()
    publisher.close()
    assert trainer.stats()["pool"]["used_bytes"] == 0


def test_use_after_close_and_shutdown(trainer: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", state(0))
    publisher.publish()
    assert subscriber.pull() == 1  # an endpoint may subscribe to itself
    with subscriber:
        pass
    with pytest.raises(tl.ClosedError):
        subscriber.pull()
    waiting = tl.WeightSubscriber("policy", state(0)).ipull(min_version=9, timeout=None)
    trainer.shutdown()
    with pytest.raises(tl.TensorLinkError):
        waiting.wait(20)
    with pytest.raises(tl.ClosedError):
        publisher.publish()
    publisher.close()


# What fits


def test_a_mismatch_names_what_differs(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    live = {"a": torch.ones(2), "b": torch.ones(3), "h": {"0": torch.ones(2, 2), "1": torch.ones(1)}}
    into = {"a": torch.zeros(3), "h": {"0": torch.zeros(2, 2, dtype=torch.float64), "2": torch.zeros(1)}}
    tl.WeightPublisher("policy", live).publish()
    subscriber = tl.WeightSubscriber("policy", into, endpoint=worker)
    with pytest.raises(tl.LayoutMismatchError) as caught:
        subscriber.pull()
    text = str(caught.value)
    for line in (
        "state_dict['a']: float32(2,) is published, into has float32(3,)",
        "state_dict['b']: missing in into, float32(3,) is published",
        "state_dict['h']['0']: float32(2, 2) is published, into has float64(2, 2)",
        "state_dict['h']['1']: missing in into",
        "state_dict['h']['2']: only in into",
    ):
        assert line in text
    assert bool((into["a"] == 0).all()) and subscriber.version is None
    eventually(lambda: trainer.stats()["pool"]["holders"] == {}, "nothing is held, also while the error is kept")


def test_a_long_list_of_differences_is_cut(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    tl.WeightPublisher("policy", {f"p{i}": torch.ones(1) for i in range(50)}).publish()
    with pytest.raises(tl.LayoutMismatchError, match="and 40 more"):
        tl.WeightSubscriber("policy", {}, endpoint=worker).pull()


def test_a_publisher_that_changes_its_tensors_is_compared_again(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    live: dict[str, torch.Tensor] = {"w": torch.ones(2)}
    publisher = tl.WeightPublisher("policy", live)
    subscriber = tl.WeightSubscriber("policy", into := {"w": torch.zeros(2)}, endpoint=worker)
    publisher.publish()
    subscriber.pull()
    live["w"] = torch.ones(3)
    version = publisher.publish()
    with pytest.raises(tl.LayoutMismatchError):
        subscriber.pull(version)
    assert subscriber.version == 1 and bool((into["w"] == 1).all())
    into["w"] = torch.zeros(3)
    assert subscriber.pull() == 2 and bool((into["w"] == 1).all())


def test_parameters_are_filled_in_place_wherever_they_are_now(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    model, copy = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    publisher = tl.WeightPublisher("policy", model.state_dict())
    subscriber = tl.WeightSubscriber("policy", dict(copy.named_parameters()), endpoint=worker)
    publisher.publish()
    subscriber.pull()
    x = torch.randn(4, 5)
    assert torch.equal(model(x), copy(x))
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    copy.weight.data = torch.empty(3, 5)  # its memory moves
    subscriber.pull(min_version=publisher.publish())
    assert torch.equal(model(x), copy(x))


def test_other_frameworks_layouts_and_values_that_are_no_tensors(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    live = {"w": torch.arange(12.0).reshape(3, 4).t(), "n": np.arange(6, dtype=np.int16)[::-2], "step": 3, "none": None}
    into = {"w": np.zeros((4, 3), np.float32), "n": torch.zeros(6, dtype=torch.int16)[::2], "name": "worker", "step": 0}
    tl.WeightPublisher("policy", live).publish()
    tl.WeightSubscriber("policy", into, endpoint=worker).pull()
    np.testing.assert_array_equal(into["w"], live["w"].numpy())
    assert into["n"].tolist() == [5, 3, 1] and into["step"] == 0


def test_tied_tensors_stay_tied(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    shared = torch.arange(1000.0)
    publisher = tl.WeightPublisher("policy", {"embed": shared, "head": shared.detach()})
    publisher.publish()
    assert publisher.stats()["bytes"] < 2 * shared.nbytes
    target = torch.zeros(1000)
    tied = {"embed": target, "head": target}
    tl.WeightSubscriber("policy", tied, endpoint=worker).pull()
    assert tied["embed"] is tied["head"] and torch.equal(target, shared)
    untied = {"embed": torch.zeros(1000), "head": torch.zeros(1000)}
    tl.WeightSubscriber("policy", untied, endpoint=worker).pull()
    assert torch.equal(untied["embed"], shared) and torch.equal(untied["head"], shared)
    tl.WeightPublisher("other", {"embed": shared, "head": shared + 1}).publish()
    with pytest.raises(tl.LayoutMismatchError, match="'head'.*shares its tensor with another place in into"):
        tl.WeightSubscriber("other", tied, endpoint=worker).pull()
    assert torch.equal(target, shared)


def test_what_cannot_travel_or_be_filled_is_told_at_once(trainer: tl.Endpoint) -> None:
    with pytest.raises(TypeError, match="sparse"):
        tl.WeightPublisher("policy", {"w": torch.eye(3).to_sparse()})
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(tl.LayoutMismatchError):
        tl.WeightSubscriber("policy", {"w": frozen})
    tl.WeightPublisher("policy", state(0))  # the name was not taken by the one that failed


# Memory


def test_a_budget_for_one_version_is_enough(worker: tl.Endpoint) -> None:
    with tl.init("small", pool_bytes=3 * MIB) as small:
        publisher = tl.WeightPublisher("big", live := {"w": torch.zeros(MIB // 2)}, endpoint=small)
        subscriber = tl.WeightSubscriber("big", into := {"w": torch.zeros(MIB // 2)}, endpoint=worker)
        for step in range(1, 5):
            live["w"].fill_(step)
            publisher.publish(step)
            assert subscriber.pull(step) == step and bool((into["w"] == step).all())
        live["w"] = torch.zeros(MIB)
        with pytest.raises(tl.PoolExhaustedError):
            publisher.publish()
        late = tl.WeightSubscriber("big", {"w": torch.zeros(MIB // 2)}, endpoint=worker)
        assert late.pull() == 4  # what could never fit took nothing away


def test_versions_use_the_same_memory_again(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", {"w": torch.zeros(MIB // 2)})
    subscriber = tl.WeightSubscriber("policy", {"w": torch.zeros(MIB // 2)}, endpoint=worker)
    committed = set()
    for step in range(20):
        publisher.publish()
        subscriber.pull()
        if step > 2:
            committed.add(trainer.stats()["pool"]["committed_bytes"])
    assert len(committed) == 1 and trainer.stats()["pool"]["blocks"] == 2


def test_stream_gives_the_same(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    tl.WeightPublisher("policy", state(4)).publish()
    subscriber = tl.WeightSubscriber("policy", into := state(0), endpoint=worker)
    assert subscriber.pull(stream=True) == 1 and same(into, state(4))


# Models as they are


@pytest.mark.parametrize("name", ["gpt2", "qwen3-30b-a3b", "llama-3-8b-awq-w4", "deepseek-v3-fp8"])
def test_manifests_of_real_models(name: str, trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    path = next(
        (p for p in (CASES / "manifests" / f"{name}.json", CASES / "manifests" / f"{name}.json.gz") if p.exists()), None
    )
    if path is None:
        pytest.skip(f"no manifests in {CASES}")
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = json.loads(text)

    def tensors(start: int | None) -> dict[str, torch.Tensor]:
        made = {}
        for i, (key, shape, dtype) in enumerate(rows):
            small = [min(d, 3) for d in shape]
            values = (
                torch.zeros(math.prod(small)) if start is None else torch.arange(math.prod(small)) + (start + i) % 50
            )
            made[key] = values.reshape(small).to(getattr(torch, dtype))
        return made

    live, into = tensors(1), tensors(None)
    publisher = tl.WeightPublisher(name, live)
    subscriber = tl.WeightSubscriber(name, into, endpoint=worker)
    for _ in range(3):
        publisher.publish()
        subscriber.pull()
    assert all(torch.equal(into[key].view(torch.uint8), live[key].view(torch.uint8)) for key in live if live[key].ndim)
    assert publisher.stats()["seconds"] + subscriber.stats()["seconds"] < 5.0


def test_the_close_of_a_publisher_ends_a_wait_for_a_version(trainer: tl.Endpoint, worker: tl.Endpoint) -> None:
    publisher = tl.WeightPublisher("policy", state(1))
    subscriber = tl.WeightSubscriber("policy", into := state(0), endpoint=worker)
    publisher.publish()
    assert subscriber.pull() == 1
    transfer = subscriber.ipull(min_version=9, timeout=None)
    publisher.close()
    with pytest.raises(tl.PeerLostError, match="closed its publisher of 'policy'"):
        transfer.wait(20)
    assert same(into, state(1)) and subscriber.version == 1
