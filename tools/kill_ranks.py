"""Kill a random process of a spread training at a random instant, again and again; every run must end as the one
that nobody disturbed.

    python tools/kill_ranks.py --runs 20
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from os import kill
from pathlib import Path

RECIPE = [
    "quickstart",
    "networks={a: wrn-10-1, b: resnet-8, c: wrn-10-1-dropout-0.3}",
    "data.train_limit=600",
    "data.test_limit=300",
    "length.epochs=4",
    "evaluation.every_epochs=1",
    "checkpoints.every_s=0.5",
    "ema=0.9",
    "runtime.device=cpu",
    "runtime.threads=1",
]


def start(out: Path, processes: int, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "codistill", "train", *RECIPE, "--out", str(out), f"--nproc={processes}"]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(pid) for pid in children.split()]


def checksums(out: Path) -> dict[str, str]:
    files = [*sorted((out / "weights").iterdir()), out / "journal.jsonl"]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--processes", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp())
    choice = random.Random(given.seed)

    began = time.monotonic()
    assert start(folder / "undisturbed", given.processes, folder / "log").wait() == 0, (folder / "log").read_text()
    length = time.monotonic() - began
    expected = checksums(folder / "undisturbed")
    same = restarted = 0
    for run in range(1, given.runs + 1):
        out, log = folder / f"run-{run}", folder / f"log-{run}"
        training = start(out, given.processes, log)
        time.sleep(choice.uniform(0.1, 1.0) * length)
        victim = "nobody: it had ended"
        with suppress(OSError):
            pids = ranks_of(training.pid)
            if pids:
                index = choice.randrange(len(pids))
                kill(pids[index], signal.SIGKILL)
                victim = f"process {index}"
        code = training.wait()
        restarts = log.read_text().count("start again")
        equal = code == 0 and checksums(out) == expected
        same, restarted = same + equal, restarted + restarts
        print(f"run {run}: killed {victim}, {restarts} restarts, exit {code}, same {equal}", flush=True)
        if equal:
            shutil.rmtree(out)
    print(f"{same} of {given.runs} ended as the undisturbed run, with {restarted} restarts; {length:.0f} s undisturbed")
    sys.exit(same != given.runs)


if __name__ == "__main__":
    main()
