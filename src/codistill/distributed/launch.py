"""Start the processes of a training on this machine, watch over them, and start them again when one is killed.

As torchrun does, with two differences: what listens does so on the loopback interface only, and a process that ends
with a message about wrong input is not started again to say it once more.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from codistill.distributed.joining import LAUNCHER
from codistill.errors import ExitCode, RunError
from codistill.hardware import cores
from codistill.log import log

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
PATIENCE_S = 10.0
"""For the others to end when one has failed; then they are killed."""


@dataclass(frozen=True)
class Ended:
    """How the processes of one attempt ended: exit codes by rank, as ``subprocess`` has them."""

    codes: Mapping[int, int]

    @property
    def well(self) -> bool:
        return not any(self.codes.values())

    @property
    def hopeless(self) -> bool:
        """Somebody said what is wrong, and it would be wrong again."""
        return ExitCode.WRONG_INPUT in self.codes.values()

    @property
    def words(self) -> str:
        """The causes; those that only lost a peer, or were ended for it, are left out if there are others."""
        killed = {rank: code for rank, code in self.codes.items() if code < 0 and code != -signal.SIGTERM}
        failed = killed or {rank: code for rank, code in self.codes.items() if code}
        return "; ".join(f"rank {rank} {_how(code)}" for rank, code in failed.items())


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def launch(command: Sequence[str], processes: int, restarts: int, stop: Callable[[], bool]) -> int:
    """Run ``command`` in every process until all end well or stop; else the exit code of who said what is wrong."""
    for attempt in range(restarts + 1):
        ended = attempt_once(command, processes, stop)
        if ended.well:
            return ExitCode.DONE
        if ended.hopeless:
            return ExitCode.WRONG_INPUT
        if stop():  # it came before all could hear it: there is nothing to save that a checkpoint lacks
            log.warning("%s while stopping; what was saved before is intact", ended.words)
            return ExitCode.DONE
        if attempt < restarts:
            log.warning(
                "%s; all start again from the last checkpoint (restart %d of %d)", ended.words, attempt + 1, restarts
            )
    raise RunError(f"{ended.words}; what was saved is intact, and the same command continues")


def attempt_once(command: Sequence[str], processes: int, stop: Callable[[], bool]) -> Ended:
    with meeting_place() as port:
        started = [
            subprocess.Popen(command, env=place(rank, processes, port), start_new_session=True)
            for rank in range(processes)
        ]
        try:
            return watch(started, stop)
        finally:
            for process in started:
                process.kill()
                process.wait()


@contextmanager
def meeting_place() -> Iterator[int]:
    """A store on a free port that only this machine reaches. It is here, so that it outlives every rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listening.fileno()),
            timeout=timedelta(seconds=PATIENCE_S),
        )
    yield port
    del store


def place(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment that torchrun would give. Threads share the cores, unless somebody has said how many."""
    return {
        "OMP_NUM_THREADS": str(max(1, cores() // processes)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        LAUNCHER: str(os.getpid()),
    }


def watch(started: Sequence[subprocess.Popen[bytes]], stop: Callable[[], bool]) -> Ended:
    """Until all have ended, or one has failed and the others have had time to say so."""
    told = False
    while any(process.poll() is None for process in started):
        if stop() and not told:
            told = True
            _tell(started)
        if any(process.poll() for process in started):
            _wait_for_the_others(started)
            break
        time.sleep(POLL_S)
    return Ended({rank: process.wait() for rank, process in enumerate(started)})


def _wait_for_the_others(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """They notice by themselves that one is gone, and say it; who is busy elsewhere, or stopped, is ended."""
    until = time.monotonic() + PATIENCE_S
    while any(process.poll() is None for process in started) and time.monotonic() < until:
        time.sleep(POLL_S)
    for process in started:
        if process.poll() is None:
            process.kill()


def _tell(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """That they shall save and stop."""
    for process in started:
        if process.poll() is None:
            process.terminate()
