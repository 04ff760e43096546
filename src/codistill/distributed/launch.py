"""Starts the ranks of a training on this machine, watches them, and restarts all when one is killed.

Torch's launcher (torchrun) starts the same ranks, and several hosts need it. Here it is replaced because its store
listens on every interface, it retries wrong input, and it signals the surviving ranks before they can report; see
docs/design.md. Imports torch only to start ranks: every ``codistill train`` asks whether it is a rank.
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

from codistill.engine.signals import launched_by_this_process
from codistill.errors import ExitCode, RunError
from codistill.hardware import cores
from codistill.log import log

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
GRACE_S = 10.0
"""How long the other ranks may take to end after one has failed; then they are killed."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return all(name in os.environ for name in RANK_VARIABLES) and os.environ["WORLD_SIZE"] != "1"


@dataclass(frozen=True)
class ExitCodes:
    """Exit codes of one attempt by rank, as ``subprocess`` returns them: negative for signals."""

    by_rank: Mapping[int, int]

    @property
    def is_wrong_input(self) -> bool:
        """Whether a rank has reported wrong input, which a restart would not change."""
        return ExitCode.WRONG_INPUT in self.by_rank.values()

    def __str__(self) -> str:
        """Names the causes: ranks that were killed, or else those that failed; not those that lost a peer."""
        killed = {rank: code for rank, code in self.by_rank.items() if code < 0 and code != -signal.SIGTERM}
        failed = killed or {rank: code for rank, code in self.by_rank.items() if code}
        return "; ".join(f"rank {rank} {_describe(code)}" for rank, code in failed.items())


def _describe(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def launch(command: Sequence[str], processes: int, restarts: int, stop: Callable[[], bool]) -> int:
    """Runs ``command`` on every rank until all succeed or stop; returns 0, or 2 where a rank reports wrong input."""
    for attempt in range(restarts + 1):
        codes = run_once(command, processes, stop)
        if not any(codes.by_rank.values()):
            return ExitCode.DONE
        if codes.is_wrong_input:
            return ExitCode.WRONG_INPUT
        if stop():  # before the ranks could handle the signal: the last checkpoint has everything
            log.warning("%s while stopping; what was saved before is intact", codes)
            return ExitCode.DONE
        if attempt < restarts:
            log.warning(
                "%s; all ranks restart from the last checkpoint (restart %d of %d)", codes, attempt + 1, restarts
            )
    raise RunError(f"{codes}; what was saved is intact, and the same command continues")


def run_once(command: Sequence[str], processes: int, stop: Callable[[], bool]) -> ExitCodes:
    with local_store() as port:
        ranks = [
            subprocess.Popen(command, env=rank_environment(rank, processes, port), start_new_session=True)
            for rank in range(processes)
        ]
        try:
            return watch(ranks, stop)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


@contextmanager
def local_store() -> Iterator[int]:
    """Opens a store on a free port of the loopback interface. It is in the launcher, so it outlives every rank."""
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
            timeout=timedelta(seconds=GRACE_S),
        )
    yield port
    del store


def rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Returns torchrun's variables. The ranks divide the cores, unless OMP_NUM_THREADS is set."""
    return {
        "OMP_NUM_THREADS": str(max(1, cores() // processes)),
        **launched_by_this_process(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def watch(ranks: Sequence[subprocess.Popen[bytes]], stop: Callable[[], bool]) -> ExitCodes:
    """Waits until all ranks have ended, or one has failed and the others have had time to report it."""
    has_signalled = False
    while any(process.poll() is None for process in ranks):
        if stop() and not has_signalled:
            has_signalled = True
            for process in ranks:
                if process.poll() is None:
                    process.terminate()  # the rank saves and stops
        if any(process.poll() for process in ranks):
            _end_others(ranks)
            break
        time.sleep(POLL_S)
    return ExitCodes({rank: process.wait() for rank, process in enumerate(ranks)})


def _end_others(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets the others notice the failure and report it; kills those that are stopped or busy elsewhere."""
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in ranks:
        if process.poll() is None:
            process.kill()
