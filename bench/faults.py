"""Thousands of faults, and a model that knows what must come of each: python -m bench.faults --faults 10000 --lease 0.3

Five pairs of processes work at once: over shared memory and TCP, messages over lanes and over gRPC, with checksums and without.
In each one peer asks and the other answers (bench/faults_peer.py) while the network between them fails, the transport
fails, a process is killed or stopped at random or at a named point of its code, leaves, or the coordinator is killed.
Every operation must end rightly or with a typed error, in time, and write nothing afterwards; between two faults
everything must work again; in the end nothing may be left. Prints a line a minute, tables, and a verdict; the exit status is 1
if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bench import faults_peer
from bench.faults_peer import GRACE_S, MIB, OPS
from tensorlink.testing.faults import Plan, Relay, strike
from tests import leaks
from tests.peer import Nursery, Peer, eventually

PRELOADED = ("numpy", "tensorlink", "tests.peer", "bench.faults_peer")
WORKS_S = 25.0
TIMEOUTS_S = (0.15, 0.3, 0.6)
GROWTH = {"fds": 25, "threads": 6, "native": 12, "mib": 200, "pool_kib": 40_000, "queued": 60}
WARM = 60
"""Faults of a pair before its asking process is measured for the first time."""
MESSAGES = ("message.sent", "message.taken", "claim.stored", "read.acknowledge")
READS = ("hold.taken", "read.stream", "read.answer", "read.bytes", "read.part", "read.acknowledge")
POINTS = {
    ("echo", "answerer"): MESSAGES,
    ("echo", "asker"): MESSAGES,
    ("lend", "answerer"): (*READS, "message.taken"),
    ("get", "asker"): READS,
    ("get", "answerer"): ("served.part", "serve.taking"),
    ("weights", "answerer"): ("version.stored", "claim.stored"),
}
"""Which points an operation brings each side to: csrc/point.h says what they are."""
CONNECTING = ("handshake.greeted", "handshake.heard", "connect.hello", "connect.handshake", "lane.up", "lane.broke")
"""Points of both sides after the network was cut."""
JOINING_POINTS = ("join.coordinator", "join.answered", "handshake.greeted", "handshake.heard")
TYPED = {
    "TransferTimeoutError",
    "PeerLostError",
    "PeerRestartedError",
    "TransportError",
    "NoPathError",
    "StaleRefError",
}
TYPED |= {"TransferCancelledError", "PeerUnknownError", "PoolExhaustedError"}
CHANGED = {"CorruptTransferError", "AuthenticationError"}
"""Only where bytes were changed on the way."""


class Wrong(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Way:
    """How a pair is connected."""

    transport: str
    control: str
    verify: bool

    @property
    def name(self) -> str:
        return f"{self.transport}/{self.control}{'/verify' if self.verify else ''}"


WAYS = (
    Way("shm", "auto", False),
    Way("shm", "grpc", False),
    Way("tcp", "auto", False),
    Way("tcp", "auto", True),
    Way("tcp", "grpc", True),
)


class Pair:
    """Two processes and their coordinator, in a run-time directory of their own. Used by one thread."""

    def __init__(self, way: Way, nursery: Nursery, lock: threading.Lock, lease_s: float, seed: int) -> None:
        self.way = way
        self.rng = random.Random(f"{seed} {way.name}")
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.outcome = ""
        """Of the last operation."""
        self.seconds: dict[str, list[float]] = {}
        self.lease_s = lease_s
        self._nursery, self._lock = nursery, lock
        self.folder = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
        self.environment = {
            "XDG_RUNTIME_DIR": str(self.folder),
            "TENSORLINK_TRANSPORTS": way.transport,
            "TENSORLINK_CONTROL": way.control,
            "TENSORLINK_TOKEN": "for this bench only",
            "TENSORLINK_LEASE_S": str(lease_s),
            "TENSORLINK_VERIFY": str(int(way.verify)),
            "TENSORLINK_POOL_BYTES": str(256 << 20),
        }
        self.relays: dict[str, Relay] = {}
        self.early: dict[str, int] = {}
        self.asker = self.start("asker", "answerer")
        self.answerer = self.new_answerer()

    def start(self, name: str, other: str) -> Peer:
        with self._lock:
            process = self._nursery.start(**self.environment)
        process.call(faults_peer.join, name, other, self.rng.randrange(1 << 30))
        if self.way.transport == "tcp":
            if relay := self.relays.pop(name, None):
                relay.close()
            relay = self.relays[name] = Relay("127.0.0.1", process.call(faults_peer.listens_at))
            process.call(faults_peer.advertise, relay.port)
        return process

    def new_answerer(self) -> Peer:
        process = self.start("answerer", "asker")
        self.asker.call(faults_peer.know, process.call(faults_peer.serve))
        return process

    # A round: one fault, one operation under it, and all works again

    def round(self) -> None:
        kinds = self.kinds()
        kind = self.rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        began = time.monotonic()
        name = kinds[kind][1](kind)
        if name:
            self.faults[name] += 1
            self.outcomes[name, self.outcome] += 1
        self.settle(name or kind)
        self.seconds.setdefault(kind if name else f"{kind}: not reached", []).append(time.monotonic() - began)
        count = self.faults.total()
        if count >= WARM and not self.early:
            self.early = self.asker.call(faults_peer.usage)

    def kinds(self) -> dict[str, tuple[float, Callable[[str], str | None]]]:
        """By name: how often, and what does it. That returns the fault's name in the report, None if nothing was hurt."""
        of_processes: dict[str, tuple[float, Callable[[str], str | None]]] = {
            "kill": (3, self.kill),
            "stop": (8, self.stop),
            "stop beyond the lease": (2, self.stop),
            "killed at": (5, self.at_point),
            "stopped at": (14, self.at_point),
            "killed joining": (1, self.join_point),
            "killed draining": (1, self.drain_point),
            "leave": (1, self.leave),
            "drain": (1, self.leave),
            "coordinator killed": (1, self.coordinator),
            "transport delays": (12, self.transport),
            "transport fails": (14, self.transport),
            "transport hangs": (12, self.transport),
        }
        if self.way.control == "grpc":
            of_processes["deliveries lost, doubled, late"] = (12, self.transport)
        if self.way.transport == "tcp":
            names = ["cut", "cut after", "cuts", "stall", "delay", "dribble", "refuse"]
            names += ["corrupt"] if self.way.verify else []
            of_processes.update({f"network: {name}": (14, self.network) for name in names})
        return of_processes

    def act(
        self,
        kind: str,
        meanwhile: Callable[[], None] | None = None,
        name: str | None = None,
        *,
        stopped: float = 0.0,
        op: str | None = None,
    ) -> None:
        """One operation of the asker; what it came to. `stopped`: how long `meanwhile` may hold up everything."""
        op, timeout = op or self.rng.choice(OPS), self.rng.choice(TIMEOUTS_S)
        self.asker.start(faults_peer.act, op, timeout)
        if meanwhile is not None:
            meanwhile()
        outcome, took = self.asker.finish(timeout + 2 * GRACE_S + 30)
        if took > timeout + GRACE_S + stopped:
            raise Wrong(f"{op} with a timeout of {timeout} s took {took:.1f} s ({outcome}) under {name or kind}")
        allowed = TYPED | CHANGED if "corrupt" in kind else TYPED
        if outcome != "right" and outcome not in allowed:
            raise Wrong(f"{op} ended with {outcome} under {name or kind}")
        self.outcome = outcome

    def settle(self, after: str) -> None:
        """Everything works again, or there is a new answerer."""
        if gone(self.asker.pid):
            raise Wrong(f"the asker has died after {after}")
        if gone(self.answerer.pid):
            raise Wrong(f"the answerer has died after {after}: status {self.answerer.wait()}")
        self.asker.start(faults_peer.works, WORKS_S)
        stuck = "" if self.asker.ready(WORKS_S / 2) else self.answerer.call(faults_peer.where)
        why = self.asker.finish(WORKS_S + 10)
        if found := self.answerer.call(faults_peer.found_wrong):
            raise Wrong(f"the answerer, after {after}: {found[0]}")
        if why:
            asker = self.asker.call(faults_peer.where)
            raise Wrong(
                f"it never worked again after {after}: {why}\nThe answerer was at\n{stuck}\nThe asker is at\n{asker}"
            )

    def replace(self, expected: int = -signal.SIGKILL) -> None:
        """After the death of the answerer."""
        status = self.answerer.wait()
        self.answerer.close()
        if status != expected:
            raise Wrong(f"the answerer ended with status {status}")
        self.answerer = self.new_answerer()

    def moment(self) -> None:
        time.sleep(self.rng.choice((0, 0.002, 0.01, 0.05)) * self.rng.random())

    # The faults

    def kill(self, kind: str) -> str:
        def meanwhile() -> None:
            self.moment()
            self.answerer.signal(signal.SIGKILL)

        self.act(kind, meanwhile)
        self.replace()
        return kind

    def stop(self, kind: str) -> str:
        seconds = self.lease_s * (2.5 if "beyond" in kind else self.rng.uniform(0.1, 0.6))

        def meanwhile() -> None:
            self.moment()
            self.answerer.signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.answerer.signal(signal.SIGCONT)

        self.act(kind, meanwhile)
        return kind

    def at_point(self, kind: str) -> str | None:
        """The answerer, and the asker where it is only stopped, comes to a named point."""
        kills = kind == "killed at"
        (op, side), points = self.rng.choice([*POINTS.items()])
        if kills and side == "asker":
            return None
        if cut := bool(self.relays) and self.rng.random() < 0.3:
            points = CONNECTING
        point = self.rng.choice([point for point in points if self.has(point)] or ["send.answer"])
        victim = self.answerer if side == "answerer" else self.asker
        times = self.rng.choice((1, 2, 3)) if point.endswith(".part") else 1
        victim.call(faults_peer.arm, f"{point}:{'kill' if kills else 'stop'}@{times}")
        if cut:
            self.relays[self.rng.choice(list(self.relays))].cut()
        name, reached = f"{kind} {point}", False
        sign = gone if kills else stopped
        pause = self.lease_s * self.rng.choice((0.3, 0.3, 1.7))

        def meanwhile() -> None:
            nonlocal reached
            reached = self.watch(victim, sign)
            if not kills:
                time.sleep(pause if reached else 0)
                victim.signal(signal.SIGCONT)

        self.act(kind, meanwhile, name, stopped=2 * self.lease_s, op=op)
        reached |= self.disarmed(victim)
        if kills and reached:
            self.replace()
        return name if reached else None

    def has(self, point: str) -> bool:
        """Whether anybody comes there on this way."""
        of_tcp = point in ("serve.taking", "served.part") or (point.startswith("read.") and point != "read.acknowledge")
        of_lane = point.startswith("message.")
        return not (
            (of_tcp and self.way.transport != "tcp")
            or (point == "hold.taken" and self.way.transport != "shm")
            or (of_lane and self.way.control == "grpc")
        )

    def watch(self, victim: Peer, sign: Callable[[int], bool]) -> bool:
        """Until the victim has come to its point: True; or the operation has ended."""
        until = time.monotonic() + max(TIMEOUTS_S) + GRACE_S
        while time.monotonic() < until:
            over = self.asker.ready(0.002)
            if sign(victim.pid):
                return True
            if over:
                break
        return False

    def disarmed(self, victim: Peer) -> bool:
        """Whether the victim came to its point all the same, before it was told to leave that."""
        late = False
        try:
            victim.start(faults_peer.arm, "")
            while not victim.ready(0.002):
                if stopped(victim.pid):
                    late = True
                    victim.signal(signal.SIGCONT)
            victim.finish()
        except (EOFError, OSError):
            return True
        return late

    def join_point(self, kind: str) -> str | None:
        """A successor of the answerer dies while it joins."""
        self.answerer.call(faults_peer.leave, "shutdown")
        self.finish(self.answerer, "answerer")
        point = self.rng.choice(JOINING_POINTS[:2])
        with self._lock:
            dying = self._nursery.start(**self.environment, TENSORLINK_TEST_POINT=f"{point}:kill")
        dying.start(faults_peer.join, "answerer", "asker", 1)
        self.act(kind, name=f"{kind} at {point}")
        status = dying.wait()
        dying.close()
        if status != -signal.SIGKILL:
            raise Wrong(f"a process that was to die at {point} ended with status {status}")
        self.answerer = self.new_answerer()
        return f"{kind} at {point}"

    def drain_point(self, kind: str) -> str | None:
        self.answerer.call(faults_peer.arm, "drain.work:kill")

        def meanwhile() -> None:
            self.moment()
            self.answerer.start(faults_peer.leave, "drain")

        self.act(kind, meanwhile)
        self.replace()
        return kind

    def leave(self, kind: str) -> str:
        def meanwhile() -> None:
            self.moment()
            self.answerer.start(faults_peer.leave, kind)

        self.act(kind, meanwhile)
        self.answerer.finish(30)
        self.finish(self.answerer, "answerer")
        self.answerer = self.new_answerer()
        return kind

    def finish(self, process: Peer, name: str) -> None:
        status = process.exit()
        process.close()
        if status:
            raise Wrong(f"the {name} ended with status {status}")

    def coordinator(self, kind: str) -> str | None:
        pids = [pid for pid, command in leaks.children().items() if str(self.folder) in command]
        if not pids:
            return None

        def meanwhile() -> None:
            self.moment()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

        self.act(kind, meanwhile)
        return kind

    def transport(self, kind: str) -> str:
        seed, share = self.rng.randrange(1 << 30), self.rng.choice((0.3, 1.0))
        plan = {
            "transport delays": Plan(seed, delay=share, delay_s=0.1),
            "transport fails": Plan(seed, fail=share),
            "transport hangs": Plan(seed, hang=share),
        }.get(kind, Plan(seed, lose=0.3, duplicate=0.3, reorder=0.3, delay_s=0.05))
        victim = self.rng.choice((self.asker, self.answerer))
        victim.call(faults_peer.hurt, plan)
        self.act(kind)
        victim.call(faults_peer.hurt, Plan())
        return kind

    def network(self, kind: str) -> str:
        relay = self.relays[self.rng.choice(list(self.relays))]

        def meanwhile() -> None:
            self.moment()
            strike(relay, kind.removeprefix("network: "), self.rng, MIB)

        if self.rng.random() < 0.5:
            meanwhile()
            self.act(kind)
        else:
            self.act(kind, meanwhile)
        relay.heal()
        return kind

    # The end

    def close(self) -> None:
        """All leave in peace, and nothing is left."""
        late = self.asker.call(faults_peer.usage)
        for what, most in GROWTH.items():
            if self.early and late[what] - self.early[what] > most:
                raise Wrong(f"{self.way.name}: the asker has {late[what]} {what} at the end, {self.early[what]} before")
        for process, name in ((self.answerer, "answerer"), (self.asker, "asker")):
            process.call(faults_peer.leave, "shutdown")
            self.finish(process, name)
        for relay in self.relays.values():
            relay.close()
        with self._lock:
            last = self._nursery.start(**self.environment)
        last.call(faults_peer.join, "last", "nobody", 0)  # sweeps what the dead have left
        last.call(faults_peer.leave, "shutdown")
        self.finish(last, "last")
        folder = self.folder / "tensorlink"
        eventually(
            lambda: not [*folder.glob("*.sock"), *folder.glob("*.log")], f"the coordinator of {self.way.name} goes"
        )
        left = [path.name for path in folder.iterdir() if path.suffix not in (".lock", ".log")]
        if [name for name in left if not name.startswith("flight-")] or len(left) > 20:
            raise Wrong(f"{self.way.name}: files are left: {left}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def abandon(self) -> None:
        for process in (self.asker, self.answerer):
            with_stacks(process)
            process.close()
        for relay in self.relays.values():
            relay.close()


def gone(pid: int) -> bool:
    return not leaks.alive(pid)


def stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def with_stacks(process: Peer) -> None:
    """Has a process that hangs write where its threads are."""
    if not gone(process.pid):
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGUSR1)
        time.sleep(0.3)


class Run:
    """All pairs, each with a thread and its share of the faults."""

    def __init__(self, nursery: Nursery, faults: int, lease_s: float, seed: int, ways: tuple[Way, ...] = WAYS) -> None:
        leaks.adopt_orphans()
        self.before = leaks.Snapshot.take()
        lock = threading.Lock()
        self.wrong: list[str] = []
        self.faults = faults
        self.begin = time.monotonic()
        self.pairs = [Pair(way, nursery, lock, lease_s, seed) for way in ways]
        self.threads = [threading.Thread(target=self._play, args=(pair,)) for pair in self.pairs]

    def _play(self, pair: Pair) -> None:
        share = -(-self.faults // len(self.pairs))
        try:
            while pair.faults.total() < share and not self.wrong:
                pair.round()
            if not self.wrong:
                pair.close()
                return
        except BaseException as error:
            told = str(error) if isinstance(error, Wrong) else traceback.format_exc()
            self.wrong.append(f"{pair.way.name}: {told}")
        pair.abandon()

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        reported = self.begin
        while any(thread.is_alive() for thread in self.threads):
            self.threads[0].join(0.2)
            time.sleep(0.05)
            if time.monotonic() - reported >= 60:
                reported = time.monotonic()
                print(f"{(reported - self.begin) / 60:4.0f} min  {self.line()}", flush=True)
        if not self.wrong and (left := leaks.settle(self.before, timeout=15)):
            self.wrong.append("left behind: " + "; ".join(left))

    def counted(self) -> tuple[Counter[str], Counter[tuple[str, str]]]:
        faults: Counter[str] = Counter()
        outcomes: Counter[tuple[str, str]] = Counter()
        for pair in self.pairs:
            faults.update(pair.faults)
            outcomes.update(pair.outcomes)
        return faults, outcomes

    def line(self) -> str:
        faults, outcomes = self.counted()
        by_outcome: Counter[str] = Counter()
        for (_, outcome), count in outcomes.items():
            by_outcome[outcome] += count
        told = " ".join(f"{name} {count}" for name, count in by_outcome.most_common())
        return f"{faults.total()} faults: {told}"

    def tables(self) -> str:
        faults, outcomes = self.counted()
        rows = ["| fault | times | right | errors |", "|---|---|---|---|"]
        for name, count in sorted(faults.items()):
            came = {outcome: n for (kind, outcome), n in outcomes.items() if kind == name}
            right = came.pop("right", 0)
            rows.append(f"| {name} | {count} | {right} | {', '.join(f'{e} {n}' for e, n in sorted(came.items()))} |")
        ways = ", ".join(f"{pair.way.name} {pair.faults.total()}" for pair in self.pairs)
        return "\n".join([*rows, "", f"By path: {ways}."])


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--lease", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="pairs whose name begins so, such as tcp/auto")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    ways = tuple(way for way in WAYS if way.name.startswith(options.only))
    nursery = Nursery(PRELOADED)
    run = Run(nursery, options.faults, options.lease, options.seed, ways)
    run.run()
    nursery.close()
    print(run.tables())
    print("\nBy path, rounds of each kind and their seconds:")
    for pair in run.pairs:
        print(
            pair.way.name, {kind: (len(took), round(sum(took) / len(took), 2)) for kind, took in pair.seconds.items()}
        )
    print(f"in {time.monotonic() - run.begin:.0f} s: {run.line()}")
    for text in run.wrong:
        print(f"WRONG: {text}")
    if not run.wrong:
        print("clean: no hang, no wrong byte, no late write, nothing lost or twice, no leak, no crash")
    sys.exit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
