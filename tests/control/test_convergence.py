"""What peers and coordinators know of one another, in any order of joins, deaths, silences, restarts and splits. No I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorlink.control.membership import Change, Lease, Membership
from tensorlink.errors import NameInUseError
from tensorlink.lifecycle import Gone, Here, Peers
from tensorlink.types import PeerId, PeerInfo

LEASE_S = 5.0
GRACE_S = 5.0
SITES = 2
HOUR_US = 3_600_000_000


class World:
    """A clock for everybody, and where each coordinator's and each peer's own is wrong."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.skew_us = 0
        self._last_us = 0

    def monotonic(self) -> float:
        return self.now

    def utc_us(self) -> int:
        self._last_us = max(self._last_us + 1, int(self.now * 1e6) + 10 * HOUR_US)  # two processes never read the same
        return self._last_us + self.skew_us


class Site:
    """Where a coordinator runs, one after the other; its state is lost each time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.attached: list[Process] = []
        self.runs = 0
        self.restart()

    def restart(self) -> None:
        for process in self.attached:
            process.site = None
        self.attached = []
        self.runs += 1
        self.epoch = f"{id(self)} {self.runs}".encode()
        self.table = Membership(LEASE_S, self._tell, clock=self._world.monotonic, utc_us=self._world.utc_us)

    def _tell(self, change: Change) -> None:
        for process in self.attached:
            if not process.silent:
                process.hear(change)


@dataclass(eq=False)
class Process:
    """What `ControlClient` does, without its threads: it joins, hears, beats, joins again, and closes when it must."""

    name: str
    nonce: bytes
    roster: Peers
    held: int = 0
    site: Site | None = None
    lease: Lease | None = None
    silent: bool = False
    closed: bool = False
    highest: dict[str, int] = field(default_factory=dict)

    def join(self, site: Site, utc_us: int) -> None:
        self.leave_site()
        site.table.learn(self.roster.incarnations())
        me = PeerInfo(PeerId(self.name, self.held), "unix:/a", "host", 1)
        try:
            lease = site.table.join(me, self.nonce, utc_us=utc_us)
        except NameInUseError:
            self.closed = True
            return
        assert self.held in (0, lease.peer.incarnation)
        self.held, self.lease, self.site = lease.peer.incarnation, lease, site
        site.attached.append(self)
        self.roster.snapshot(site.epoch, site.table.peers(), now=site.table._clock(), grace_s=GRACE_S)
        self.look()

    def leave_site(self) -> None:
        if self.site is not None:
            self.site.attached.remove(self)
        self.site = None

    def hear(self, change: Change) -> None:
        gone = change.kind == "down"
        self.roster.hear(Gone(change.peer.id, change.reason) if gone else Here(change.peer))
        self.look()

    def beat(self) -> bool:
        """Whether its lease stands."""
        return self.site is not None and self.lease is not None and self.site.table.beat(self.lease.key) is not None

    def look(self) -> None:
        for name, incarnation in self.roster.incarnations().items():
            assert incarnation >= self.highest.get(name, 0), "an incarnation went backwards"
            self.highest[name] = incarnation


class Convergence(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.sites = [Site(self.world) for _ in range(SITES)]
        self.processes: list[Process] = []
        self.given: dict[tuple[str, int], Process] = {}
        self.stepped_back = False

    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.closed]

    def join(self, process: Process, site: Site) -> None:
        process.join(site, self.world.utc_us())
        if not process.closed:
            owner = self.given.setdefault((process.name, process.held), process)
            assert owner is process or self.stepped_back, "two processes have one incarnation"

    def one_of(self, data: st.DataObject, *, silent: bool | None = None) -> Process | None:
        found = [process for process in self.alive() if silent is None or process.silent == silent]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(name=st.sampled_from("abc"), site=st.integers(0, SITES - 1))
    def starts(self, name: str, site: int) -> None:
        process = Process(name, len(self.processes).to_bytes(16, "big"), Peers(name))
        self.processes.append(process)
        self.join(process, self.sites[site])

    @rule(data=st.data(), told=st.booleans())
    def dies(self, data: st.DataObject, told: bool) -> None:
        if process := self.one_of(data):
            process.closed = True
            if told and process.site is not None and process.lease is not None:
                process.site.table.end(process.lease.key, "its process died")
            process.leave_site()

    @rule(data=st.data(), silent=st.booleans())
    def is_cut_off_or_comes_back(self, data: st.DataObject, silent: bool) -> None:
        if process := self.one_of(data, silent=not silent):
            process.silent = silent
            if process.site is not None and not silent:  # what it missed is told by a snapshot
                self.join(process, process.site)

    @rule(data=st.data(), site=st.integers(0, SITES - 1))
    def joins_again(self, data: st.DataObject, site: int) -> None:
        if process := self.one_of(data, silent=False):
            self.join(process, self.sites[site])

    @rule(site=st.integers(0, SITES - 1))
    def a_coordinator_restarts(self, site: int) -> None:
        self.sites[site].restart()

    @rule(skew_s=st.integers(-3600, 3600))
    def a_clock_steps(self, skew_s: int) -> None:
        self.stepped_back |= skew_s * 1_000_000 < self.world.skew_us
        self.world.skew_us = skew_s * 1_000_000

    @rule(fifths=st.integers(1, 12))
    def time_passes(self, fifths: int) -> None:
        for _ in range(fifths):
            self.world.now += LEASE_S / 5
            lost = [
                process for process in self.alive() if not (process.silent or process.site is None or process.beat())
            ]
            for site in self.sites:
                site.table.expire()
            for process in lost:
                if process.site is not None:
                    self.join(process, process.site)
            for process in self.alive():
                process.roster.expire(self.world.now)
                process.look()

    @precondition(lambda self: self.processes)
    @rule(site=st.integers(0, SITES - 1), seed=st.integers(0, 1 << 16))
    def all_meet_at_one(self, site: int, seed: int) -> None:
        """The faults end: whatever there was, one membership is left, and all know the same."""
        self.sites[1 - site].restart()
        latest: dict[str, int] = {}
        for name, incarnation in self.given:
            latest[name] = max(latest.get(name, 0), incarnation)
        winners = {one.name: one.held for one in self.alive() if one.held == latest[one.name]}
        for process in random.Random(seed).sample(self.alive(), len(self.alive())):
            if process.silent or process.site is not self.sites[site] or not process.beat():
                process.silent = False
                self.join(process, self.sites[site])
        self.time_passes(15 if self.alive() else 610)  # while it hears nobody, a coordinator gives nobody up
        table = self.sites[site].table
        members = {peer.name: peer.incarnation for peer in table.peers()}
        assert members == {process.name: process.held for process in self.alive()}
        for process in self.alive():
            assert {info.name: info.incarnation for info in process.roster.members()} == members
        assert self.stepped_back or winners.items() <= members.items(), "the latest of a name has it, if it is alive"

    @invariant()
    def a_name_has_one_holder(self) -> None:
        for site in self.sites:
            held = [one.name for one in site.attached if one.lease is not None and site.table.by_key(one.lease.key)]
            assert len(held) == len(set(held))


Convergence.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestConvergence = Convergence.TestCase
