"""Everything at once, for as long as is wanted: python -m bench.soak --minutes 10

Five actors send, read, publish and pull over every transport that this machine has, while one after the other is
killed, stopped for a while, or ends by itself, and starts again under its name. Each checks all that it gets
(bench/soak_actor.py). Prints a line a minute, and a verdict; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any, NoReturn

LEASE_S = 1.0
PUBLISHER = "publisher"
ACTORS = {PUBLISHER: "", "near": "", "also-near": "", "far": "tcp", "also-far": "tcp"}
"""By name, the transports that it may use: those with `tcp` alone are reached as if they were on another host."""
STEADY = "near"
"""Never hurt: what it has must not grow."""
GROWTH = {"fds": 60, "threads": 12, "mib": 300}
STARTS_S = 120.0
ENDS_S = 30.0


class Process:
    """One life of an actor."""

    def __init__(self, soak: Soak, name: str) -> None:
        self.name = name
        others = ",".join(other for other in ACTORS if other != name)
        role = "publishes" if name == PUBLISHER else "pulls"
        environment = os.environ | soak.environment | {"SOAK_NAME": name}
        if ACTORS[name]:
            environment["TENSORLINK_TRANSPORTS"] = ACTORS[name]
        command = [sys.executable, "-m", "bench.soak_actor", name, others, role, str(soak.rng.randrange(1 << 30))]
        self.popen = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=soak.log, text=True
        )
        self.counts: Counter[str] = Counter()
        self.usage: list[dict[str, int]] = []
        self.reader = threading.Thread(target=self._read, args=(soak,), daemon=True)
        self.reader.start()

    def _read(self, soak: Soak) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            try:
                told: dict[str, Any] = json.loads(line)
            except ValueError:
                continue  # it was killed in the middle of a line
            if "wrong" in told:
                soak.wrong.append(told["wrong"])
            else:
                self.counts = Counter(told["counts"])
                self.usage.append(told["usage"])

    def may_end(self) -> None:
        """Doesn't wait for it. Idempotent."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def end(self) -> int:
        """Lets it end by itself; its exit status."""
        self.may_end()
        try:
            return self.popen.wait(ENDS_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.reader.join()


class Soak:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = tempfile.mkdtemp(prefix="tl-soak-")
        self.log = open(os.path.join(self.folder, "log"), "w")  # noqa: SIM115 — as long as this lives
        self.environment = {
            "XDG_RUNTIME_DIR": self.folder,
            "TENSORLINK_TOKEN": "for the soak only",
            "TENSORLINK_LEASE_S": str(LEASE_S),
            "TENSORLINK_POOL_BYTES": str(512 << 20),
            "TENSORLINK_LOG": "ERROR",
        }
        self.wrong: list[str] = []
        self.hurt: Counter[str] = Counter()
        self.past: Counter[str] = Counter()
        self.processes = {name: Process(self, name) for name in ACTORS}

    # What is done to them

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.again(name)

    def leave(self, name: str) -> None:
        status = self.processes[name].end()
        if status:
            self.wrong.append(f"{name} ended with status {status}")
        self.again(name)

    def stop(self, name: str, seconds: float) -> None:
        popen = self.processes[name].popen
        popen.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        popen.send_signal(signal.SIGCONT)

    def stop_briefly(self, name: str) -> None:
        self.stop(name, LEASE_S / 3)

    def stop_beyond_the_lease(self, name: str) -> None:
        self.stop(name, LEASE_S * 2.5)

    WAYS = (kill, kill, leave, stop_briefly, stop_beyond_the_lease)

    def again(self, name: str) -> None:
        self.past += self.processes[name].counts
        self.processes[name] = Process(self, name)

    # From begin to end

    def wait_for_all(self) -> None:
        """Until each actor has told of itself, so that what follows is traffic and not the start of processes."""
        deadline = time.monotonic() + STARTS_S
        while not (self.wrong or all(process.usage for process in self.processes.values())):
            if time.monotonic() > deadline:
                self.wrong.append("not all actors have started")
            time.sleep(0.1)

    def run(self, seconds: float) -> None:
        self.wait_for_all()
        begin = reported = time.monotonic()
        while (now := time.monotonic()) < begin + seconds and not self.wrong:
            time.sleep(self.rng.uniform(0.5, 2.0))
            way, name = self.rng.choice(self.WAYS), self.rng.choice([name for name in ACTORS if name != STEADY])
            way(self, name)
            self.hurt[way.__name__] += 1
            for name, process in self.processes.items():
                if process.popen.poll() is not None:
                    self.wrong.append(f"{name} ended by itself with status {process.popen.returncode}")
            if now - reported >= 60:
                reported = now
                print(f"{(now - begin) / 60:4.0f} min  {self.line()}", flush=True)

    def counts(self) -> Counter[str]:
        return sum((process.counts for process in self.processes.values()), self.past)

    def line(self) -> str:
        counts = self.counts()
        errors = {name: n for name, n in counts.items() if name.endswith("Error")}
        good = {name: n for name, n in counts.items() if name not in errors}
        usage = (self.processes[STEADY].usage or [{}])[-1]
        parts: list[dict[str, int]] = [good, errors, dict(self.hurt), usage]
        return " | ".join(" ".join(f"{name} {n}" for name, n in sorted(part.items())) for part in parts)

    def close(self) -> None:
        # All at once: each waits for calls of others that end by their deadline only.
        for process in self.processes.values():
            process.may_end()
        for process in self.processes.values():
            try:
                if (status := process.end()) and not self.wrong:
                    self.wrong.append(f"{process.name} ended with status {status}")
            except subprocess.TimeoutExpired:
                self.wrong.append(f"{process.name} doesn't end")
        self._compare(self.processes[STEADY].usage)
        self.log.close()

    def _compare(self, usage: list[dict[str, int]]) -> None:
        """The steady one, near the end against a third of the way: by then all caches are warm."""
        if len(usage) < 6:
            return
        early, late = usage[len(usage) // 3], usage[-2]
        for what, most in GROWTH.items():
            if late[what] - early[what] > most:
                self.wrong.append(f"{STEADY} has {late[what]} {what} at the end, {early[what]} before")


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    soak = Soak(options.seed)
    try:
        soak.run(options.minutes * 60)
    finally:
        soak.close()
    print(f"  total  {soak.line()}")
    for text in soak.wrong:
        print(f"WRONG: {text}")
    if soak.wrong:
        print(f"what the actors said: {soak.log.name}")
        sys.exit(1)
    shutil.rmtree(soak.folder)
    print("clean: no wrong byte, no hang, no late write, nothing lost or twice, no growth")
    sys.exit(0)


if __name__ == "__main__":
    main()
