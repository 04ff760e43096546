"""A pool of worker processes that decode images during a training, each driven by one thread of this process.

Workers are programs of their own (``decoder.py``), not forks: a fork copies a process whose other threads hold locks,
and a spawned copy would run the user's script again. They share no lock, so a worker that is killed or hangs affects no
other: it is replaced and gets the same requests again. Pixels come back through shared memory.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector

import torch
from torch import Tensor

from codistill.data.decoder import Answer, Decoder, Examined, Request, Resize
from codistill.log import log

ATTEMPTS = 3
MAX_CHUNK = 8  # images per request: a round trip costs this process as much time as decoding one costs a worker
PACKAGES = Path(__file__).parents[2]


class SharedMemory:
    """``size`` bytes that a process started with ``descriptor`` can map too.

    The memory has no name, so it is freed when all processes are killed, and it is not in /dev/shm, which is small in
    containers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("codistill")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self.map = mmap.mmap(self.descriptor, size)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self._is_pinned = False

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU do not block the host."""
        if self._is_pinned:
            return
        self._is_pinned = True
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.tensor.data_ptr()
        status = int(cudart.cudaHostRegister(address, self.size, 0))
        if status:
            log.warning("%d MB cannot be pinned (CUDA error %d): copies wait for the host", self.size >> 20, status)
        else:
            weakref.finalize(self, cudart.cudaHostUnregister, address)


class WorkerLostError(Exception):
    """A worker process died or did not answer in time."""


class Worker:
    """One worker process, started on its first request and again after it was lost."""

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
        return [Answer(error, Examined(*facts) if facts else None) for error, facts in json.loads(line)]

    def _start(self) -> "subprocess.Popen[str]":
        descriptor = self.memory.descriptor if self.memory else None
        # -P, or a json.py in the user's folder would shadow the standard library's.
        command = [
            sys.executable,
            "-P",
            "-m",
            "codistill.data.decoder",
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
            # Closes the pipes and waits for the process; a request still in the buffer is dropped.
            with suppress(BrokenPipeError), process:
                pass


class DecoderPool:
    """``workers`` processes; with 0 the calling process decodes, with the same result."""

    def __init__(self, workers: int, image_size: int, resize: Resize, timeout_s: float = 120.0) -> None:
        self.workers, self.image_size, self.resize, self.timeout_s = workers, image_size, resize, timeout_s
        self.memory: SharedMemory | None = None
        self._close = self._open()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        return 3, self.image_size, self.image_size

    def slots(self, count: int) -> Tensor:
        """Return shared memory for ``count`` images that the workers write to; it invalidates an earlier one."""
        size = count * 3 * self.image_size**2
        if self.memory is None or self.memory.size < size:
            self._close()
            self.memory = SharedMemory(size)
            self._close = self._open()
        return self.memory.tensor[:size].view(count, *self.shape)

    def answers(self, requests: Iterable[Request], ahead: int) -> Generator[Answer, None, None]:
        """Yield the answer to every request, in order; at most ``ahead`` are in flight or waiting to be taken."""
        if not self.workers:
            yield from map(self._here.answer, requests)
            return
        chunk_size = max(1, min(MAX_CHUNK, ahead // (2 * self.workers)))
        remaining = iter(requests)
        pending: deque[Future[list[Answer]]] = deque()
        in_flight = 0
        try:
            while chunk := list(islice(remaining, chunk_size)):
                while pending and in_flight + len(chunk) > ahead:
                    answers = pending.popleft().result()
                    in_flight -= len(answers)
                    yield from answers
                pending.append(self._threads.submit(self._ask, chunk))
                in_flight += len(chunk)
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            wait(pending)  # requests in flight write to memory that the next caller may use

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
            # One by one, to find the image that crashes the worker, if one does.
            return [_ask_again(worker, request) for request in requests]
        finally:
            self._idle.put(worker)


def _ask_again(worker: Worker, request: Request) -> Answer:
    """Repeat one request until the worker answers, up to ``ATTEMPTS`` times in all."""
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
