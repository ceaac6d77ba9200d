"""
TensorLink's native core: memory, messages and copies. Private; use `tensorlink`.
"""

from typing import Any


class Packed:
    """
    An object taken apart: `meta` describes it, the payload holds its tensors' bytes.
    """

    @property
    def meta(self) -> bytes: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the packed payload."""

    @property
    def tensors(self) -> int:
        """Distinct tensors."""

    def single(self) -> tuple[tuple[int, ...], str, int] | None:
        """(shape, dtype, itemsize) of an object that is one tensor, or None."""

    def to_bytes(self) -> bytes:
        """The payload; the gaps between tensors are zero."""

    def copy_to(self, address: int) -> None:
        """Writes the payload to `nbytes` of memory at `address`."""

    def meta_in_place(self, extents: list[tuple[int, int]]) -> bytes | None:
        """
        Meta that refers to the tensors where they lie, in [(address, nbytes)]; None: some lie elsewhere.
        """

def pack(object: object | None, *, writable: bool = False) -> Packed:
    """
    Takes an object apart. Raises: TypeError, ValueError; LayoutMismatchError if `writable`.
    """

def unpack(meta: bytes, buffer: object, like: object | None = None, copy: bool = True) -> Any:
    """
    The object of `meta` with its payload in `buffer`. Raises: CorruptTransferError, TypeError.
    """

def describe(meta: bytes) -> list[tuple[str, tuple[int, ...], str, int, int | None]]:
    """
    (path, shape, dtype, nbytes, index of the tensor it repeats or None) a tensor.
    """

def fill(meta: bytes, buffer: object, out: object | None) -> Any:
    """
    Fills the tensors of `out` and returns its tree with the scalars of the message. Raises: LayoutMismatchError.
    """

def meta_frameworks(meta: bytes, like: object | None = None) -> int:
    """Bits: 1 numpy, 2 torch; what `unpack` would build."""

def torch_by_attributes(only: bool) -> None:
    """For tests: as with a torch that has no C exchange API."""

def crc32c(address: int, nbytes: int, crc: int = 0) -> int:
    """
    The checksum of `nbytes` of memory at `address` after the bytes that `crc` is the checksum of.
    """

def crc32c_combine(first: int, second: int, nbytes: int) -> int:
    """
    The checksum of two parts in a row from theirs; `nbytes` is the length of the second.
    """

def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA-256 (RFC 2104), 32 bytes."""

def waited() -> str | None:
    """What this thread waits for, or waited for last, in one sentence."""

class Span:
    """An operation in flight that Python told of."""

    def end(self, outcome: str, failed: bool) -> None:
        """On its own thread; idempotent."""

class Flight:
    """The flight recorder of an endpoint. From any thread; never blocks."""

    @property
    def path(self) -> str:
        """Its file; empty: there is none."""

    @property
    def error(self) -> str:
        """Why there is no file, if one was wanted."""

    def begin(self, what: str, peer: str, phase: str, note: str = '') -> Span:
        """
        This thread is in an operation from now on; within another one this is its next phase.
        """

    def note(self, what: str, outcome: str, peer: str = '', incarnation: int = 0, transport: str = '', text: str = '', failed: bool = False) -> None:
        """Records an event."""

    def failed(self, phase: str, error: str, peer: str, incarnation: int, transport: str, text: str, late: bool) -> None:
        """
        Records what an error tells of, with what this thread was waiting for; one that is `late` only after a while.
        """

    def find(self, thread: int) -> bytes | None:
        """What a thread does, by its native id: a record, or None."""

EAGER_LIMIT: int = 32768

ANY_SOURCE: int = 4294967295

def arm_points(plan: str) -> None:
    """
    For tests: at which points this process is killed or stopped (csrc/point.h); empty: at none.
    """

def void_frame(frame: bytes) -> bytes:
    """
    The frame that takes the place of one that was given up: only its number counts.
    """

def claim_of(descriptor: bytes) -> int: ...

class Message:
    """A message that was taken from the inbox."""

    @property
    def source(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def descriptor(self) -> bytes: ...

    @property
    def meta(self) -> bytes: ...

    @property
    def offered(self) -> bool:
        """The object lies in the sender's pool."""

    @property
    def connection(self) -> Connection:
        """The connection to its sender, or None."""

    def unpack(self, like: object | None) -> Any: ...

    def fill(self, out: object, stop: Stop | None, timeout_s: float) -> Any: ...

    def consumed(self) -> None:
        """
        Gives the sender its credit back. Call once, when the application has the object.
        """

class NoMessage:
    """Why a receive ended without one."""

    @property
    def lost(self) -> bool:
        """The source that was named is down."""

    @property
    def lapsed(self) -> bool:
        """
        A source was named, and others took this process for lost. Neither: the time was over.
        """

class Posted:
    """A receive that was posted before its message came."""

    @property
    def lost(self) -> bool: ...

    @property
    def lapsed(self) -> bool: ...

class Stored:
    """An object in the pool, under a claim that is its user's to release."""

    @property
    def claim(self) -> int: ...

    @property
    def descriptor(self) -> bytes: ...

    @property
    def meta(self) -> bytes:
        """Empty: it is in the pool, too."""

    def fill(self) -> None:
        """Copies what isn't there yet. Readers may have begun."""

class Throttle:
    """
    Failed attempts to come in, by origin; keeps nobody out. The time, in seconds, is given.
    """

    def __init__(self) -> None: ...

    def failed(self, origin: str, now_s: float) -> bool:
        """
        Counts one. True: one too many: its answer is to wait for DELAY_S, and nobody is told but by untold().
        """

    def untold(self, now_s: float) -> list[tuple[str, int]]:
        """Failures that nobody was told of, by origin, where it is time to."""

    def __len__(self) -> int: ...

    BURST: int = 10

    ORIGINS: int = 1024

    DELAY_S: float = 1.0

    TELL_S: float = 10.0

    OTHERS: str = 'other addresses'

class Connection:
    """A connection to one incarnation of a peer."""

    @property
    def peer_name(self) -> str: ...

    @property
    def peer_incarnation(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def reader(self) -> int: ...

    @property
    def serial(self) -> int: ...

    @property
    def up(self) -> bool: ...

    @property
    def owes(self) -> bool:
        """Whether messages wait for an acknowledgement."""

    @property
    def gone(self) -> bool: ...

    @property
    def holds(self) -> int:
        """Holds of this process on the peer's memory."""

    def send(self, object: object | None, tag: str) -> Packed | None:
        """None: sent. Else the packed object: too large, or no room now."""

    def read_board(self, name: str) -> tuple[int, bytes] | None:
        """(version, descriptor) of the newest notice, or None."""

    def counters(self) -> dict[str, int]: ...

class Stop:
    """Stops an operation from another thread."""

    def __init__(self) -> None: ...

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

class View:
    """
    An object in a peer's pool, opened here: mapped, or brought over when it is looked at.
    """

    @property
    def nbytes(self) -> int: ...

    def pass_on(self) -> bool:
        """
        Call it before the view is looked at: while it lives, other hosts may read from here what was read. False: they need not.
        """

    def addresses(self) -> list[tuple[int, int]]: ...

    def copy_to(self, address: int, stop: Stop | None) -> None:
        """Copies the payload's spans, one after the other."""

    def unpack(self, meta: bytes, like: object | None, copy: bool = False, stop: Stop | None = None, timeout_s: float = -1) -> Any: ...

    def fill(self, meta: bytes, out: object, stop: Stop | None, timeout_s: float) -> Any: ...

class Refill:
    """
    An object that is filled again and again. Raises: TypeError, LayoutMismatchError.
    """

    def __init__(self, target: object) -> None: ...

    def prepare(self, view: View, stop: Stop | None, timeout_s: float) -> None:
        """
        Compares, and writes nothing. The view's meta is in the pool. Raises: LayoutMismatchError.
        """

    def run(self, view: View, through: bool, stop: Stop | None, timeout_s: float) -> None:
        """
        Fills. Unless it goes straight `through`, all is here before the first byte is written, and then all is.
        """

class Engine:
    """Pool, connections and messages of one endpoint."""

    def __init__(self, name: str, path: str, key: bytes, pool_bytes: int, flight: str = '') -> None: ...

    def start(self, incarnation: int) -> None: ...

    def close(self) -> None: ...

    @property
    def closed(self) -> bool: ...

    @property
    def flight(self) -> Flight:
        """Its flight recorder."""

    def connect(self, path: str, key: bytes, name: str, incarnation: int, timeout_s: float, stop: Stop | None = None) -> Connection: ...

    def secure(self, cert: str, key: str, ca: str, name: str) -> None:
        """
        From now on each TCP stream is inside TLS: files of PEM, and the DNS name that all certificates carry. Before listen() and dial().
        """

    @property
    def secured(self) -> bool:
        """Whether TCP streams are inside TLS."""

    def listen(self, host: str, first: int, last: int) -> int:
        """Listens for other hosts at a numeric address; returns the port. Once."""

    def dial(self, host: str, port: int, key: bytes, name: str, incarnation: int, timeout_s: float, stop: Stop | None = None) -> Connection: ...

    def limit(self, bytes_per_s: int) -> None:
        """What is sent to one other host's peer at most; 0: as fast as it goes."""

    def verify(self, on: bool) -> None:
        """Whether everything that is stored from now on gets a checksum."""

    def undelivered(self, name: str, incarnation: int) -> bool:
        """Whether messages to that peer wait for a lane that works."""

    def refusals(self) -> list[str]:
        """Whom the TCP port turned away since the last call, and why."""

    def suspects(self) -> list[tuple[str, int, str, int]]:
        """
        Peers whose streams ended without a word since the last call: name, incarnation, and where they listened.
        """

    @property
    def owes(self) -> bool:
        """Whether peers on other hosts haven't got yet what was sent to them."""

    def sent_bytes(self) -> int:
        """Bytes of this process's memory that peers on other hosts have read."""

    def connections(self) -> list[Connection]: ...

    def disconnect(self, connection: Connection) -> None: ...

    def set_peer(self, name: str, incarnation: int, up: bool) -> None: ...

    def lapse(self) -> None:
        """Others took this process for lost: receives that name one of them end."""

    def avoid(self, name: str, incarnation: int) -> None:
        """From now on no reader is sent to that peer."""

    def heartbeat(self, address: str, key: bytes, interval_s: float) -> None: ...

    def heartbeat_state(self) -> int:
        """0 idle, 1 connecting, 2 beating, 3 rejected, 4 unreachable"""

    def store(self, packed: Packed, reads: int, ttl_s: float, reader: int, inline_meta: int, timeout_s: float, checksum: bool = False, later: bool = False) -> Stored | None:
        """
        Copies an object into the pool. None: no room before the deadline. `later`: it may be copied by fill().
        """

    def claim_in_place(self, packed: Packed, reads: int, ttl_s: float, checksum: bool = False) -> Stored | None:
        """
        As store() without a copy, for tensors that already lie in the pool. None: some lie elsewhere.
        """

    def release(self, claim: int) -> bool: ...

    def expose(self, address: int, nbytes: int) -> bytes | None:
        """
        Descriptor of memory, copied into the pool unless it lies there; None: no room.
        """

    def empty(self, nbytes: int, timeout_s: float) -> Any:
        """Writable bytes in the pool, or None: no room before the deadline."""

    def publish(self, name: str, version: int, descriptor: bytes) -> bool: ...

    def published(self, name: str) -> tuple[int, bytes] | None:
        """
        What this process published last under a name: (version, descriptor), or None.
        """

    def open(self, connection: Connection, descriptor: bytes, timeout_s: float) -> View: ...

    def sweep(self) -> None: ...

    def usage(self) -> dict[str, Any]: ...

    def receive(self, source: int, tag: str, timeout_s: float, out: Any, like: str | None) -> Any:
        """
        The object of the next message; or its Message, if there is more to do; or NoMessage.
        """

    def source(self, name: str) -> int: ...

    def is_down(self, source: int) -> bool: ...

    def source_name(self, source: int) -> str: ...

    def put_back(self, message: Message) -> None: ...

    def post(self, source: int, tag: str) -> Posted: ...

    def posted_done(self, posted: Posted) -> bool: ...

    def posted_far(self, posted: Posted) -> bool:
        """
        Whether its message has come, and what that offers is still on another host.
        """

    def posted_wait(self, posted: Posted, timeout_s: float) -> bool: ...

    def posted_awaited(self, posted: Posted) -> None:
        """
        Somebody awaits it, and no thread: to the flight recorder it is in flight until it has ended.
        """

    def posted_collect(self, posted: Posted) -> Message:
        """
        Its message, or None: it was still waiting (and is withdrawn), or its source is down.
        """

    def send_packed(self, connection: Connection, packed: Packed, tag: str, timeout_s: float) -> bool:
        """False: no room before the deadline."""

    def announce(self, connection: Connection, descriptor: bytes) -> None:
        """
        Hands the memory that it names to the peer, which can then map it without us.
        """

    def send_offer(self, connection: Connection, descriptor: bytes, meta: bytes, tag: str, timeout_s: float) -> bool: ...

    def frame(self, name: str, incarnation: int, tag: str, meta: bytes, descriptor: bytes, payload: bytes) -> bytes:
        """A message as bytes, for another carrier."""

    def deliver(self, name: str, incarnation: int, frame: bytes) -> None:
        """Takes a message that another carrier brought."""

    def wait_board(self, connection: Connection, name: str, version: int, timeout_s: float) -> bool: ...

    def watch(self, on: bool) -> None: ...

    @property
    def event_fd(self) -> int: ...

    @property
    def queued(self) -> int: ...
