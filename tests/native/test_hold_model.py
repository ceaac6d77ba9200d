"""The hold protocol (`csrc/holds.h`, `csrc/claims.h`) explored over every interleaving, with a kill at every step.

The model: one slot and one block, which the owner fills, offers under an id, ends, and fills again under the next id; one
or two readers that take and clear holds, may close their connection while another thread takes, and may be killed at
any step, as may the owner. Stores wait in a buffer for each process and become visible in order, at any later moment,
or at a fence (x86-TSO: Sewell et al., CACM 2010): a missing fence shows. What a killed process has stored becomes visible.

Safety: while a reader reads, between a successful take and its clear, the block holds what it held under its id. Liveness: when
nothing can happen any more, the block is free. Each rule of the protocol is shown to be needed by leaving it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class Rules:
    """The protocol as it is; a test leaves one rule out."""

    reader_fence: bool = True
    reread: bool = True
    owner_fence: bool = True
    bump_before_scan: bool = True
    check_finishing: bool = True
    forget_at_end_only: bool = True  # a silent reader stays pinned until its socket ends
    claims: int = 3  # how many ids the owner gives out, one after the other


@dataclass(frozen=True)
class Reader:
    at: str = "idle"  # idle, written, fenced, taken, counted, using, cleared, dead
    handle: int = 0
    attempts: int = 2
    entry: int = 0
    buffer: tuple[int, ...] = ()  # stores to its entry that nobody else sees yet
    leases: int = 0
    finishing: str = "no"  # no, said, done
    socket: bool = True
    known: bool = True  # the owner still scans its entries

    @property
    def reading(self) -> bool:
        return self.at == "using"


@dataclass(frozen=True)
class State:
    readers: tuple[Reader, ...]
    owner: str = "free"  # free, filled, standing, bumped, fenced, scanned, parked, dead
    turn: int = 0  # how many ids came before; they are 1, 3, 5, ...: the generations in which they stand
    generation: int = 0
    block: int = 0  # the id under which it was filled
    buffer: tuple[tuple[str, int], ...] = ()  # the owner's stores
    held: bool = False  # what a scan before the bump had seen

    def with_reader(self, i: int, **changes: object) -> State:
        readers = list(self.readers)
        readers[i] = replace(readers[i], **changes)  # type: ignore[arg-type]
        return replace(self, readers=tuple(readers))


def owner_sees(state: State, claim: int) -> bool:
    return any(reader.known and reader.entry == claim for reader in state.readers)


def commit(state: State, name: str, value: int) -> State:
    return replace(state, generation=value) if name == "generation" else replace(state, block=value)


def owner_steps(state: State, rules: Rules) -> Iterator[State]:
    if state.owner == "dead":
        return
    claim = 2 * state.turn + 1 if state.turn < rules.claims else 0
    if state.buffer:
        yield commit(replace(state, buffer=state.buffer[1:]), *state.buffer[0])
    match state.owner:
        case "free" if claim:
            yield replace(state, owner="filled", buffer=(*state.buffer, ("block", claim)))
        case "filled":
            yield replace(state, owner="standing", buffer=(*state.buffer, ("generation", claim)))
        case "standing" if rules.bump_before_scan:
            yield replace(state, owner="bumped", buffer=(*state.buffer, ("generation", claim + 1)))
        case "standing":
            yield replace(state, owner="scanned", held=owner_sees(state, claim))
        case "scanned":
            bumped = replace(state, buffer=(*state.buffer, ("generation", claim + 1)))
            yield replace(bumped, owner="parked") if state.held else replace(bumped, owner="free", turn=state.turn + 1)
        case "bumped" if not rules.owner_fence or not state.buffer:
            yield replace(state, owner="fenced")
        case "fenced" if owner_sees(state, claim):
            yield replace(state, owner="parked")
        case "fenced" | "parked" if not owner_sees(state, claim):
            yield replace(state, owner="free", turn=state.turn + 1)
    for i, reader in enumerate(state.readers):
        if reader.known and not (rules.forget_at_end_only and reader.socket):
            yield state.with_reader(i, known=False)
    dead = replace(state, owner="dead", buffer=())
    for store in state.buffer:
        dead = commit(dead, *store)
    yield dead


def drop(reader: Reader) -> Reader:
    """A lease ends: the last one of a connection that is being closed tells the owner."""
    leases = reader.leases - 1
    return replace(reader, at="idle", leases=leases, socket=reader.socket and not (leases == 0 and reader.finishing != "no"))


def reader_steps(state: State, i: int, rules: Rules) -> Iterator[State]:
    reader = state.readers[i]
    if reader.at == "dead":
        return
    if reader.buffer:
        yield state.with_reader(i, entry=reader.buffer[0], buffer=reader.buffer[1:])
    flushed = not reader.buffer
    match reader.at:
        case "idle" if reader.attempts and reader.finishing != "done":
            for handle in range(1, 2 * state.turn + 2, 2):
                if handle <= state.generation:  # it was published
                    yield state.with_reader(
                        i, at="written", handle=handle, attempts=reader.attempts - 1, buffer=(*reader.buffer, handle)
                    )
        case "written" if flushed or not rules.reader_fence:
            yield state.with_reader(i, at="fenced")
        case "fenced" if state.generation == reader.handle or not rules.reread:
            yield state.with_reader(i, at="taken")
        case "fenced":
            yield state.with_reader(i, at="idle", buffer=(*reader.buffer, 0))
        case "taken" if flushed:  # counting leases is an atomic read-modify-write, a fence of its own
            yield state.with_reader(i, at="counted", leases=reader.leases + 1)
        case "counted" if reader.finishing != "no" and rules.check_finishing:
            yield state.with_reader(i, at="cleared", buffer=(*reader.buffer, 0))
        case "counted":
            yield state.with_reader(i, at="using")
        case "using":
            yield state.with_reader(i, at="cleared", buffer=(*reader.buffer, 0))
        case "cleared" if flushed:
            readers = list(state.readers)
            readers[i] = drop(reader)
            yield replace(state, readers=tuple(readers))
    if reader.finishing == "no":  # another thread closes the connection
        yield state.with_reader(i, finishing="said")
    if reader.finishing == "said":
        yield state.with_reader(i, finishing="done", socket=reader.socket and reader.leases > 0)
    entry = reader.buffer[-1] if reader.buffer else reader.entry
    readers = list(state.readers)
    readers[i] = Reader(at="dead", attempts=0, entry=entry, socket=False, known=reader.known)
    yield replace(state, readers=tuple(readers))


def steps(state: State, rules: Rules) -> Iterator[State]:
    yield from owner_steps(state, rules)
    for i in range(len(state.readers)):
        yield from reader_steps(state, i, rules)


def torn(state: State) -> bool:
    return any(reader.reading and state.block != reader.handle for reader in state.readers)


def leaked(state: State) -> bool:
    """In a state where nothing can happen but deaths."""
    return state.owner not in ("dead", "free")


def explore(rules: Rules, readers: int, attempts: int) -> tuple[int, str]:
    """How many states there are, and what is wrong with the first bad one."""
    start = State(tuple(Reader(attempts=attempts) for _ in range(readers)))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        if torn(state):
            return len(seen), "torn"
        following = list(steps(state, rules))
        alive = [s for s in following if (s.owner == "dead") == (state.owner == "dead")]
        if not alive and leaked(state):
            return len(seen), "leaked"
        for other in following:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return len(seen), ""


@pytest.mark.parametrize(("readers", "attempts", "claims"), [(1, 2, 3), (2, 1, 2)])
def test_no_reader_sees_recycled_memory_and_no_block_is_lost(readers: int, attempts: int, claims: int) -> None:
    states, wrong = explore(Rules(claims=claims), readers, attempts)
    assert wrong == ""
    assert states > 1000


@pytest.mark.parametrize(
    "rules",
    [
        Rules(reread=False),
        Rules(bump_before_scan=False),
        Rules(reader_fence=False),
        Rules(owner_fence=False),
        Rules(check_finishing=False),
        Rules(forget_at_end_only=False),
    ],
    ids=["no second look", "scan before bump", "no reader's fence", "no owner's fence", "no look at closing", "lease ends holds"],
)
def test_every_rule_is_needed(rules: Rules) -> None:
    assert explore(rules, readers=1, attempts=2)[1] == "torn"


def test_a_dead_readers_hold_would_leak_without_its_sockets_end() -> None:
    start = State((Reader(at="dead", entry=1, socket=True),), owner="parked", generation=2, block=1)
    assert [s for s in steps(start, Rules()) if s.owner != "dead"] == []
    assert leaked(start)
