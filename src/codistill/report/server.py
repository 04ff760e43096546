"""The live page, served to this machine alone. It only reads the runs' files, so it cannot slow or stop a training."""

import errno
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from codistill.report.overview import Overview, overview
from codistill.report.page import live
from codistill.report.read import expand, find
from codistill.runs.folder import RunFolder

LOOPBACK = "127.0.0.1"
VERSION = "Codistill-Version"
# A page of another site must not read this one by giving its own name to our address.
HOSTS = ("127.0.0.1", "localhost")


class News:
    """The runs below some paths, read again when one of their files has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._lock = threading.Lock()
        self._version = ""
        self._page = ""

    def look(self) -> Overview:
        return overview(find(self.paths))

    def version(self) -> str:
        """Of what the files say, told by their sizes and times: reading those costs next to nothing."""
        places = [place for path in self.paths for place in expand(path)]
        marks = [_mark(file) for place in places for file in _files(place)]
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]

    def page(self) -> tuple[str, str]:
        """The version and its HTML, made once for all who ask."""
        with self._lock:
            version = self.version()
            if version != self._version:
                self._page, self._version = live(self.look()).html(), version
            return self._version, self._page


def _files(place: Path) -> tuple[Path, ...]:
    run = RunFolder(place)
    return (run.journal, run.timing, run.result, run.recipe) if place.is_dir() else (place,)


def _mark(file: Path) -> tuple[str, int, int]:
    try:
        facts = file.stat()
    except OSError:  # such as a link to itself; who reads it names it
        return str(file), 0, 0
    return str(file), facts.st_size, facts.st_mtime_ns


class Handler(BaseHTTPRequestHandler):
    """The page at ``/``, and at ``/news?since=VERSION`` the page again if it has changed since."""

    server_version, sys_version = "codistill", ""
    server: "Server"

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").partition(":")[0] not in HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine alone")
            return
        asked = urlsplit(self.path)
        if asked.path not in ("/", "/news"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            version, page = self.server.news.page()
        except (ValueError, OSError) as error:  # a run that was moved away meanwhile
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
        """Who looks at the page is not worth a line."""


class Server(ThreadingHTTPServer):
    """Listens on the loopback address; ``port`` 0 takes any that is free."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, news: News, port: int) -> None:
        self.news = news
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else "is not for you to use"
            raise ValueError(f"--port {port} {why}; choose another, or leave it out to take one that is free") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


def serve(news: News, port: int, ready: Callable[[str], None]) -> float:
    """Serve until interrupted; the CPU seconds that it took. ``ready`` hears the address."""
    began_s = time.process_time()
    # A shell that starts something in the background tells it to ignore interrupts; this is how it ends, though.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Server(news, port) as server:
        ready(server.address)
        server.serve_forever(poll_interval=0.5)
    return time.process_time() - began_s
