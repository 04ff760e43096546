"""Processes that decode images beside the training, each asked by a thread of ours.

They are programs of their own (``worker.py``) and not forks: a fork copies a process whose other threads hold locks,
and a spawned copy would run the user's script again. They share no lock either, so that one which is killed or hangs
takes nobody with it: it is replaced, and asked the same again. Pixels come back through shared memory.
"""

import json
import os
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from torch import Tensor

from codistill.data.decoding import Answer, Decoder, Examined, Request, Resize
from codistill.data.memory import SharedMemory

ATTEMPTS = 3
TIMEOUT_S = 120.0
MAX_CHUNK = 8  # images asked for at once: a question costs as much of this process's time as answering takes a worker
PACKAGES = Path(__file__).parents[2]


class WorkerLostError(Exception):
    """It died, or did not answer in time."""


class Worker:
    """One process, started when it is first asked, and again after it was lost."""

    def __init__(self, settings: dict[str, object], memory: SharedMemory | None, timeout_s: float) -> None:
        self.settings, self.memory, self.timeout_s = settings, memory, timeout_s
        self.process: subprocess.Popen[str] | None = None

    def ask(self, requests: list[Request]) -> list[Answer]:
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(requests) + "\n")
            process.stdin.flush()
            with DefaultSelector() as selector:
                selector.register(process.stdout, EVENT_READ)
                line = process.stdout.readline() if selector.select(self.timeout_s) else ""
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            self.end()
            raise WorkerLostError
        return [Answer(error, _examined(facts)) for error, facts in json.loads(line)]

    def _start(self) -> "subprocess.Popen[str]":
        descriptor = self.memory.descriptor if self.memory else None
        # -P, or a file called json.py in the user's folder would be taken for Python's own.
        command = [
            sys.executable,
            "-P",
            "-m",
            "codistill.data.worker",
            json.dumps({**self.settings, "memory": descriptor}),
        ]
        paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
            pass_fds=[descriptor] if descriptor is not None else [],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            # Closes its pipes and waits for its end; what it was still to be told has nobody to hear it.
            with suppress(BrokenPipeError), process:
                pass


class Decoders:
    """``workers`` processes; with 0 the calling process decodes by itself, and the result is the same."""

    def __init__(self, workers: int, image_size: int, resize: Resize, timeout_s: float = TIMEOUT_S) -> None:
        self.workers, self.image_size, self.resize, self.timeout_s = workers, image_size, resize, timeout_s
        self.memory: SharedMemory | None = None
        self._close = self._open()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of every image: channels, height, width."""
        return 3, self.image_size, self.image_size

    def slots(self, count: int) -> Tensor:
        """``count`` places for images that the processes write to; a new call may end the last one's use."""
        size = count * 3 * self.image_size**2
        if self.memory is None or self.memory.size < size:
            self._close()
            self.memory = SharedMemory(size)
            self._close = self._open()
        return self.memory.tensor[:size].view(count, *self.shape)

    def answers(self, requests: Iterable[Request], ahead: int) -> Generator[Answer, None, None]:
        """The answer to every request, in their order; at most ``ahead`` are under way or waiting to be taken."""
        if not self.workers:
            yield from map(self._here.answer, requests)
            return
        chunk_size = max(1, min(MAX_CHUNK, ahead // (2 * self.workers)))
        remaining = iter(requests)
        pending: deque[Future[list[Answer]]] = deque()
        under_way = 0
        try:
            while chunk := list(islice(remaining, chunk_size)):
                while pending and under_way + len(chunk) > ahead:
                    answers = pending.popleft().result()
                    under_way -= len(answers)
                    yield from answers
                pending.append(self._threads.submit(self._ask, chunk))
                under_way += len(chunk)
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            wait(pending)  # what is under way writes to memory that somebody else may use next

    def close(self) -> None:
        self._close()

    def _open(self) -> weakref.finalize:  # type: ignore[type-arg]
        settings: dict[str, object] = {"image_size": self.image_size, "resize": self.resize}
        self._here = Decoder(self.image_size, self.resize, memoryview(self.memory.map) if self.memory else None)
        self.processes = [Worker(settings, self.memory, self.timeout_s) for _ in range(self.workers)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.processes:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="decoding")
        return weakref.finalize(self, _end_all, self._threads, self.processes)

    def _ask(self, requests: list[Request]) -> list[Answer]:
        worker = self._idle.get()
        try:
            return worker.ask(requests)
        except WorkerLostError:
            # One by one, to find the image that did it, if one did.
            return [_ask_again(worker, request) for request in requests]
        finally:
            self._idle.put(worker)


def _examined(facts: list[Any] | None) -> Examined | None:
    if facts is None:
        return None
    sha256, sums, squares = facts
    return Examined(sha256, tuple(sums), tuple(squares))


def _ask_again(worker: Worker, request: Request) -> Answer:
    for _ in range(1, ATTEMPTS):
        try:
            (answer,) = worker.ask([request])
        except WorkerLostError:
            continue
        return answer
    return Answer(
        f"the process that decodes it was lost {ATTEMPTS} times: it died, or took over {worker.timeout_s:g} s"
    )


def _end_all(threads: ThreadPoolExecutor, workers: list[Worker]) -> None:
    threads.shutdown(cancel_futures=True)
    for worker in workers:
        worker.end()
