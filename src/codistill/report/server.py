"""Serves the live page, to this machine only. It reads the files of the runs and does not affect the training."""

import errno
import hashlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from codistill.report.overview import read_overview
from codistill.report.page import live_page
from codistill.report.read import expand
from codistill.runs.folder import RunFolder

LOOPBACK = "127.0.0.1"
VERSION = "Codistill-Version"
# Protects against DNS rebinding: another site must not read this page by resolving its own name to this address.
HOSTS = ("127.0.0.1", "localhost")
TIMEOUT_S = 10.0
"""How long a client may take to send its request, and to read each part of the answer."""
MAX_CONNECTIONS = 64
"""Connections served at once, each by a thread; further ones wait in the backlog."""
HURRIED_S = 1.0
"""How long a client may take to send its request when others wait."""
BACKLOG = 1024


class RunWatcher:
    """Reads the runs at some paths again when one of their files has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._lock = threading.Lock()
        self._version = ""
        self._page = ""

    def version(self) -> str:
        """Return a hash of the sizes and times of all files, which is cheap to compute."""
        paths = [found for path in self.paths for found in expand(path)]
        marks = [_mark(file) for path in paths for file in _files(path)]
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]

    def page(self) -> tuple[str, str]:
        """Return the version and its HTML, cached for all clients."""
        with self._lock:
            version = self.version()
            if version != self._version:
                self._page, self._version = live_page(read_overview(*self.paths)).html(), version
            return self._version, self._page


def _files(path: Path) -> tuple[Path, ...]:
    run = RunFolder(path)
    return (run.journal, run.timing, run.result, run.recipe) if path.is_dir() else (path,)


def _mark(file: Path) -> tuple[str, int, int]:
    try:
        facts = file.stat()
    except OSError:  # such as a link to itself; reading the run reports it
        return str(file), 0, 0
    return str(file), facts.st_size, facts.st_mtime_ns


class Handler(BaseHTTPRequestHandler):
    """Serves the page at ``/``, and at ``/news?since=VERSION`` only if it has changed since."""

    server_version, sys_version = "codistill", ""
    timeout = TIMEOUT_S
    server: "Server"

    def do_GET(self) -> None:
        self.server.has_asked(self.connection)
        if (self.headers.get("Host") or "").partition(":")[0] not in HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is served to this machine only")
            return
        asked = urlsplit(self.path)
        if asked.path not in ("/", "/news"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            version, page = self.server.news.page()
        except (ValueError, OSError) as error:  # a run was moved in the meantime
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "", str(error), "text/plain")
            return
        since = parse_qs(asked.query).get("since", [""])[0]
        if asked.path == "/news" and since == version:
            self._answer(HTTPStatus.NO_CONTENT, version)
        else:
            self._answer(HTTPStatus.OK, version, page)

    def _answer(self, status: HTTPStatus, version: str, text: str = "", kind: str = "text/html") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header(VERSION, version)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name in the standard library)
        """Do not log requests."""


class Server(ThreadingHTTPServer):
    """Listens on the loopback address; ``port`` 0 takes a free one."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(self, news: RunWatcher, port: int) -> None:
        self.news = news
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._silent: dict[Any, float] = {}
        """When each client connected that has not sent its request yet, the first one first."""
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else "needs more privileges"
            raise ValueError(f"--port {port} {why}; choose another, or leave it out to use a free one") from None

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # out of descriptors: the connection stays in the backlog, so select returns at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=0.1):
            self._drop_slow_clients()
        self._silent[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._free.release()

    def has_asked(self, request: Any) -> None:
        """Note that a client has sent its request, or is gone."""
        self._silent.pop(request, None)

    def _drop_slow_clients(self) -> None:
        """End connections without a request after a second: one that sends a byte now and then would keep its place."""
        for request, since in list(self._silent.items()):
            if time.monotonic() - since > HURRIED_S:
                with suppress(OSError):  # its thread has just closed it
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, except that a client hung up or was too slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


def serve(news: RunWatcher, port: int, ready: Callable[[str], None]) -> float:
    """Serve until interrupted and return the CPU seconds used; ``ready`` is called with the address."""
    began_s = time.process_time()
    # Shells start background jobs with SIGINT ignored, but SIGINT is how this server is stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Server(news, port) as server:
        ready(server.address)
        server.serve_forever(poll_interval=0.5)
    return time.process_time() - began_s
