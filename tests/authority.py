"""Certificates for tests, by the command `openssl`: good ones, and each kind that must be refused; and a tap on the wire."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A CA in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.pem"
        openssl("req", "-x509", *KEY, "-days", "2", "-subj", "/CN=tests", "-keyout", folder / "ca.key", "-out", self.ca)

    def issue(self, who: str, *, name: str = "tensorlink", days: int = 2, more: str = "") -> dict[str, str]:
        """The environment of a process with a certificate for that DNS name; `more` are extensions of it."""
        key, request, cert = (self._folder / f"{who}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = ["-addext", f"subjectAltName=DNS:{name}", *(["-addext", more] if more else [])]
        openssl("req", *KEY, "-subj", f"/CN={who}", *extensions, "-keyout", key, "-out", request)
        signer = ("-CA", self.ca, "-CAkey", self._folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *signer, "-copy_extensions", "copy", "-days", str(days), "-out", cert)
        return {"TENSORLINK_TLS_CERT": str(cert), "TENSORLINK_TLS_KEY": str(key), "TENSORLINK_TLS_CA": str(self.ca)}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another CA, which nobody here believes."""
    return Authority(tmp_path_factory.mktemp("other"))


class Tap:
    """Listens, passes every connection on to a target, and keeps what goes either way in `seen`."""

    def __init__(self, host: str, port: int) -> None:
        self.seen = bytearray()
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, function: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._target)
                self._open += [near, far]
                self._run(self._pass_on, near, far)
                self._run(self._pass_on, far, near)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()
