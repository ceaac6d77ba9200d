"""The selector: what holds for any links, and the arithmetic that decides."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlink.paths import EXPECTED_USES, End, PathReport, choose
from tensorlink.topology import Device, Topology
from tensorlink.topology import Link as Wire
from tensorlink.types import Figure, Link

KIB, MIB = 1 << 10, 1 << 20
SHM = Link("shm", bytes_per_s=20e9, latency_s=2e-6, reach="host")
TCP = Link("tcp", bytes_per_s=3e9, latency_s=30e-6, reach="network")
HERE, THERE = End("one", (SHM, TCP)), End("other", (SHM, TCP))

rates = st.floats(1e6, 1e12)
latencies = st.floats(0, 1e-2)
sizes = st.integers(0, 1 << 40)
figures = st.builds(Figure, latencies, rates)
links = st.builds(
    Link,
    transport=st.sampled_from("abcd"),
    bytes_per_s=rates,
    latency_s=latencies,
    reach=st.sampled_from(("process", "host", "network")),
    devices=st.sampled_from((("cpu",), ("gpu",), ("cpu", "gpu"))),
    unavailable=st.sampled_from((None, None, None, "it is broken")),
    setup_s=st.sampled_from((0.0, 1e-3, 1.0)),
    over=st.sampled_from((None, "memory", "gpu", "nic")),
    stripes=st.booleans(),
)
MACHINE = Topology(
    devices=(
        Device(name="CPU0", kind="cpu"),
        Device(name="CPU1", kind="cpu"),
        Device(name="GPU0", kind="gpu"),
        Device(name="GPU1", kind="gpu"),
        Device(name="nic0", kind="nic", bytes_per_s=25 * 10**9),
        Device(name="nic1", kind="nic", bytes_per_s=10 * 10**9),
        Device(name="bridge", kind="nic", bytes_per_s=10**15, virtual=True),
    ),
    links=(
        Wire(a="CPU0", b="CPU1", link_class="SYS", bytes_per_s=40 * 10**9),
        Wire(a="GPU0", b="GPU1", link_class="NV4", bytes_per_s=100 * 10**9),
        Wire(a="GPU0", b="nic0", link_class="PIX", bytes_per_s=16 * 10**9),
        Wire(a="GPU0", b="nic1", link_class="PIX", bytes_per_s=16 * 10**9),
        Wire(a="GPU0", b="bridge", link_class="PIX"),
        Wire(a="GPU1", b="nic1", link_class="SYS"),
        Wire(a="CPU0", b="nic0", link_class="PHB", bytes_per_s=16 * 10**9),
        Wire(a="CPU0", b="nic1", link_class="PHB", bytes_per_s=16 * 10**9),
        Wire(a="CPU0", b="GPU0", link_class="PHB", bytes_per_s=16 * 10**9),
    ),
)
devices = st.sampled_from(("cpu", "CPU0", "CPU1", "GPU0", "GPU1"))
ends = st.builds(
    End,
    host=st.sampled_from(("one", "other")),
    links=st.lists(links, max_size=6).map(tuple),
    topology=st.sampled_from((None, MACHINE)),
    device=devices,
)
facts = st.dictionaries(st.sampled_from("abcd"), figures)
barred = st.dictionaries(st.sampled_from("abcd"), st.just("it failed"))


def chosen(report: PathReport) -> str | None:
    return report.chosen.transport if report.chosen is not None else None


def reasons(report: PathReport) -> dict[str, str]:
    return {candidate.transport: candidate.reason for candidate in report.candidates}


@given(ends, ends, sizes, facts, barred)
def test_never_a_path_that_one_side_cannot_do(
    a: End, b: End, nbytes: int, measured: dict[str, Figure], broken: dict[str, str]
) -> None:
    report = choose(a, b, nbytes, measured=measured, reasons=broken)
    assert {one.transport for one in report.candidates} == {*a.by_transport, *b.by_transport, *broken}
    for one in report.candidates:
        if not one.usable:
            assert one.reason and one.seconds is None and not one.hops
            continue
        assert one.transport not in broken
        for end in (a, b):
            mine = [link for link in end.by_transport[one.transport] if not link.unavailable]
            assert any(end.kind in link.devices for link in mine)
            assert a.host == b.host or any(link.reach == "network" for link in mine)
        assert "bridge" not in one.nics
        assert (one is report.chosen) == (one.reason == "")
    usable = [one.seconds for one in report.candidates if one.usable]
    assert usable == sorted(usable) and (report.chosen is not None) == bool(usable)  # type: ignore[type-var]
    assert json.loads(json.dumps(report.to_json()))["chosen"] == chosen(report)
    assert str(report).count("\n") == 1 + len(report.candidates)


@given(ends, ends, sizes, facts)
def test_both_ends_choose_alike(a: End, b: End, nbytes: int, measured: dict[str, Figure]) -> None:
    there, back = choose(a, b, nbytes, measured=measured), choose(b, a, nbytes, measured=measured)
    assert chosen(there) == chosen(back)
    assert [one.transport for one in there.candidates] == [one.transport for one in back.candidates]
    assert [one.seconds for one in there.candidates] == [one.seconds for one in back.candidates]


@given(ends, ends, sizes, sizes, facts)
def test_more_bytes_never_take_less_time(a: End, b: End, one: int, other: int, measured: dict[str, Figure]) -> None:
    few, many = (choose(a, b, nbytes, measured=measured) for nbytes in sorted((one, other)))
    least = {candidate.transport: candidate.seconds for candidate in few.candidates}
    for candidate in many.candidates:
        before = least[candidate.transport]
        assert (before is None) == (candidate.seconds is None)
        assert before is None or candidate.seconds is None or before <= candidate.seconds
    if few.chosen is not None and many.chosen is not None:
        assert few.chosen.seconds <= many.chosen.seconds  # type: ignore[operator]


@given(rates, st.floats(1.001, 1000), latencies)
def test_of_one_latency_the_faster_link_never_loses_at_large_sizes(rate: float, times: float, latency: float) -> None:
    both = (Link("a", rate, latency, "network"), Link("z", rate * times, latency, "network"))
    assert chosen(choose(End("one", both), End("other", both), 1 << 40)) == "z"


def test_what_takes_equally_long_is_ordered_by_name() -> None:
    both = (Link("z", 1e9, 1e-6, "network"), Link("a", 1e9, 1e-6, "network"))
    report = choose(End("one", both), End("other", both), MIB)
    assert chosen(report) == "a" and reasons(report)["z"] == "no faster than a, whose name comes first"


def test_small_ones_go_by_latency_and_large_ones_by_bandwidth() -> None:
    both = (Link("quick", 1e9, 1e-6, "network"), Link("wide", 50e9, 20e-6, "network"))
    a, b = End("one", both), End("other", both)
    assert chosen(choose(a, b, KIB)) == "quick"
    report = choose(a, b, 256 * MIB)
    assert chosen(report) == "wide"
    assert reasons(report)["quick"] == "268 ms against 5.4 ms by wide"


def test_set_up_is_borne_by_many_transfers_and_not_by_a_connection_that_stands() -> None:
    both = (Link("dear", 2e9, 1e-6, "network", setup_s=1.0), Link("plain", 1e9, 1e-6, "network"))
    a, b = End("one", both), End("other", both)
    report = choose(a, b, MIB)
    assert chosen(report) == "plain"
    (dear,) = [one for one in report.candidates if one.transport == "dear"]
    assert dear.seconds == pytest.approx(1e-6 + MIB / 2e9 + 1.0 / EXPECTED_USES)
    assert chosen(choose(a, b, MIB, connected={"dear"})) == "dear"
    assert chosen(choose(a, b, 1024 * MIB)) == "dear"


def test_what_was_measured_wins_over_what_is_declared() -> None:
    here = dataclasses.replace(THERE, host="one")
    assert chosen(choose(HERE, here, MIB)) == "shm"
    slow = {"shm": Figure(latency_s=1e-3, bytes_per_s=1e9, samples=7)}
    report = choose(HERE, here, MIB, measured=slow)
    assert chosen(report) == "tcp"
    (shm,) = [one for one in report.candidates if one.transport == "shm"]
    assert (shm.measured, shm.latency_s, shm.bytes_per_s) == (slow["shm"], 1e-3, 1e9)
    assert "measured, 7 times" in str(report)
    nonsense = {"shm": Figure(latency_s=0, bytes_per_s=0)}
    assert chosen(choose(HERE, here, MIB, measured=nonsense)) == "shm"


def test_every_loser_says_why() -> None:
    assert reasons(choose(HERE, THERE, MIB)) == {"tcp": "", "shm": "it is on another host"}
    same = choose(HERE, dataclasses.replace(THERE, host="one"), MIB)
    assert reasons(same) == {"shm": "", "tcp": "380 µs against 54.4 µs by shm"}
    told = choose(HERE, THERE, 0, reasons={"shm": "excluded by the setting transports", "far": "it is not here"})
    assert reasons(told) == {"tcp": "", "shm": "excluded by the setting transports", "far": "it is not here"}
    barred = choose(HERE, THERE, 0, allowed=lambda name: name != "tcp")
    assert barred.chosen is None and reasons(barred)["tcp"] == "it isn't allowed"
    assert "no path" in barred.headline()
    gone = dataclasses.replace(TCP, unavailable="it needs a token")
    assert reasons(choose(HERE, End("other", (SHM, gone)), 0))["tcp"] == "not at the other side: it needs a token"
    assert reasons(choose(HERE, End("other", (TCP,)), 0))["shm"] == "the other side doesn't have it"
    gpu = dataclasses.replace(THERE, device="GPU0")
    assert reasons(choose(HERE, gpu, 0))["tcp"] == "it moves cpu memory only, and GPU0 is a gpu"


def test_of_a_transport_with_several_links_the_one_that_fits_counts() -> None:
    several = (SHM, dataclasses.replace(TCP, transport="shm", bytes_per_s=1e9))
    near = choose(End("one", several), End("one", several), MIB)
    far = choose(End("one", several), End("other", several), MIB)
    assert near.chosen is not None and near.chosen.bytes_per_s == 20e9
    assert far.chosen is not None and far.chosen.bytes_per_s == 1e9


def test_an_end_travels_without_what_it_has_found_out() -> None:
    end = End("one", (TCP,), device="CPU0")
    fresh = pickle.dumps(end)
    choose(end, THERE, MIB)
    assert pickle.dumps(end) == fresh
    again = pickle.loads(fresh)
    assert again == end and hash(again) == hash(end)


def test_bytes_below_nothing_and_devices_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="0 bytes or more"):
        choose(HERE, THERE, -1)
    with pytest.raises(KeyError):
        choose(End("one", (TCP,), MACHINE, "GPU7"), THERE, 1)
    with pytest.raises(ValueError, match="nic0 is a nic"):
        choose(End("one", (TCP,), MACHINE, "nic0"), THERE, 1)


RDMA = Link("rdma", 100e9, 5e-6, "network", devices=("cpu", "gpu"))
STRIPED = dataclasses.replace(RDMA, stripes=True)


def over(link: Link, device: str, to: str = "GPU0", host: str = "other") -> tuple[tuple[str, ...], float | None]:
    report = choose(End("one", (link,), MACHINE, device), End(host, (link,), MACHINE, to), MIB)
    assert report.chosen is not None
    return report.chosen.nics, report.chosen.bytes_per_s


def test_a_way_is_as_wide_as_its_narrowest_hop() -> None:
    assert over(RDMA, "GPU0") == (("nic0",), 16e9), "the PCIe between GPU and NIC"
    assert over(RDMA, "GPU1") == (("nic1",), 10e9), "the NIC"
    slow = dataclasses.replace(RDMA, bytes_per_s=1e9)
    assert over(slow, "GPU0") == (("nic0",), 1e9), "the transport"


def test_stripes_use_all_that_are_equally_near() -> None:
    assert over(STRIPED, "CPU0", "CPU0") == (("nic0", "nic1"), 32e9), "both ways from the memory"
    assert over(STRIPED, "GPU0") == (("nic0", "nic1"), 16e9), "which share the one wire of the GPU"
    assert over(STRIPED, "GPU0", "GPU1") == (("nic0", "nic1"), 10e9), "the other end has one NIC"
    for a, b in ((RDMA, STRIPED), (STRIPED, RDMA)):
        report = choose(End("one", (a,), MACHINE, "GPU0"), End("other", (b,), MACHINE, "GPU0"), MIB)
        assert report.chosen is not None and report.chosen.nics == ("nic0",), "both ends must"


def test_nics_of_which_nothing_is_known_but_that_they_are_there() -> None:
    bare = Topology(devices=tuple(one for one in MACHINE.devices if one.name in ("GPU0", "nic1", "bridge")))
    report = choose(End("one", (STRIPED,), bare, "GPU0"), End("other", (STRIPED,)), MIB)
    assert report.chosen is not None and report.chosen.nics == ("nic1",)
    assert [hop.what for hop in report.chosen.hops] == ["GPU0 - nic1", "nic1 - network", "network - cpu"]


def test_ways_within_a_host() -> None:
    wire = Link("wire", 1e12, 1e-6, "host", devices=("cpu", "gpu"), over="gpu")

    def hops(link: Link, a: str, b: str) -> list[tuple[str, str | None]]:
        report = choose(End("one", (link,), MACHINE, a), End("one", (link,), MACHINE, b), MIB)
        assert report.chosen is not None
        return [(hop.what, hop.link_class) for hop in report.chosen.hops]

    assert hops(wire, "GPU0", "GPU1") == [("GPU0 - GPU1", "NV4")]
    assert hops(wire, "GPU0", "GPU0") == [("memory of GPU0", None)]
    assert hops(SHM, "CPU0", "CPU1") == [("CPU0 - CPU1", "SYS")]
    assert hops(SHM, "CPU0", "CPU0") == hops(SHM, "cpu", "CPU1") == [("memory", None)]
    assert hops(TCP, "CPU0", "CPU1") == [("loopback", None)]
    staged = dataclasses.replace(SHM, devices=("cpu", "gpu"))
    assert hops(staged, "GPU0", "CPU0") == [("GPU0 - CPU0", "PHB"), ("memory", None)]
