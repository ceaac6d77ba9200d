"""Who may call: the token is checked before anything that a caller sends is read, and failures cost little.

A caller with the right token is served at once, whatever others at its address do. Of those without, each address has a few
answered at once; further answers wait a second, and the log has them as one line with their number.
"""
# mypy: disable-error-code="no-untyped-call,misc,type-arg"

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import grpc
import grpc.aio

from tensorlink import _core
from tensorlink.control import wire
from tensorlink.errors import AuthenticationError

log = logging.getLogger("tensorlink.control")

MAX_WAITING = 64
"""Answers that wait at a time; those beyond are given at once. A peer has a thread of its 256 for each."""


class Logins:
    """Checks tokens and counts failures. Thread-safe."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._throttle = _core.Throttle()
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = threading.Event()

    def refusal(self, metadata: Any) -> AuthenticationError | None:
        """Why a call that comes with this is refused, if it is."""
        try:
            wire.check_token(self._token, metadata)
        except AuthenticationError as error:
            return error
        return None

    def begin_wait(self, caller: str, error: AuthenticationError) -> bool:
        """Counts a failure. Whether its answer is to wait for `Throttle.DELAY_S`, and then `end_wait` to be called."""
        origin = caller.rpartition(":")[0] or caller
        with self._lock:
            late = self._throttle.failed(origin, time.monotonic())
            waits = late and self._waiting < MAX_WAITING
            self._waiting += waits
        if not late:
            log.warning("refused a call from %s: %s", caller, error.message)
        self.tell()
        return waits

    def end_wait(self) -> None:
        """After `begin_wait` was true."""
        with self._lock:
            self._waiting -= 1

    def tell(self) -> None:
        """Logs what was only counted, where it is time to. To be called now and then."""
        with self._lock:
            untold = self._throttle.untold(time.monotonic())
        for origin, count in untold:
            log.warning("refused calls from %s: %d more in a short time, with no token or a wrong one", origin, count)

    def wait(self) -> None:
        """What an answer waits, on a thread; less if `close` is called."""
        self._closed.wait(_core.Throttle.DELAY_S)

    def close(self) -> None:
        """Ends waits on threads."""
        self._closed.set()


class Gate(grpc.ServerInterceptor):
    """Of a server with threads. Whoever is refused has no message of its read: it may be large, and many may come at once."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        error = self._logins.refusal(details.invocation_metadata)
        return continuation(details) if error is None else grpc.stream_stream_rpc_method_handler(self._refuses(error))

    def _refuses(
        self, error: AuthenticationError
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
        def refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            if self._logins.begin_wait(context.peer(), error):
                self._logins.wait()
                self._logins.end_wait()
            code, message, trailing = wire.status_of(error)
            context.set_trailing_metadata(trailing)
            context.abort(code, message)
            yield b""  # never: it makes this a generator

        return refuse


class AsyncGate(grpc.aio.ServerInterceptor):
    """The same of a server with an event loop."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        error = self._logins.refusal(details.invocation_metadata)
        if error is None:
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(cast(Any, self._refuses(error)))

    def _refuses(self, error: AuthenticationError) -> Callable[[Any, Any], AsyncIterator[bytes]]:
        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            if self._logins.begin_wait(context.peer(), error):
                try:
                    await asyncio.sleep(_core.Throttle.DELAY_S)
                finally:
                    self._logins.end_wait()
            await context.abort(*wire.status_of(error))
            yield b""  # never: it makes this a generator

        return refuse
