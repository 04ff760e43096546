"""Kill a random process of a spread training at a random instant, again and again; every run must end as the one
that nobody disturbed.

    python tools/kill_ranks.py --runs 20
    python tools/kill_ranks.py --runs 5 -- processes.weights=sharded --shards=2
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
    "data.train_limit=300",
    "data.test_limit=200",
    "length.epochs=5",
    "evaluation.every_epochs=1",
    "checkpoints.every_s=0.5",
    "ema=0.9",
    "runtime.device=cpu",
    "runtime.threads=1",
]


def start(out: Path, log: Path, given: argparse.Namespace) -> "subprocess.Popen[bytes]":
    to = ["--out", str(out), f"--nproc={given.processes}"]
    command = [sys.executable, "-m", "codistill", "train", *RECIPE, *given.more, *to]
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
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("more", nargs="*", help="for codistill train, after --")
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp())
    choice = random.Random(given.seed)

    began = time.monotonic()
    assert start(folder / "undisturbed", folder / "log", given).wait() == 0, (folder / "log").read_text()
    length = time.monotonic() - began
    expected = checksums(folder / "undisturbed")
    same = kills = 0
    while kills < given.runs:
        out, log = folder / f"run-{kills}", folder / f"log-{kills}"
        training = start(out, log, given)
        time.sleep(choice.uniform(0.05, 1.0) * length)
        victim = kill_one(training.pid, choice)
        code = training.wait()
        if victim is None:
            shutil.rmtree(out)
            continue  # it had ended already: this does not count
        kills += 1
        equal = code == 0 and checksums(out) == expected
        same += equal
        restarts = log.read_text().count("start again")
        print(f"{kills}: killed process {victim}, {restarts} restarts, exit code {code}, same {equal}", flush=True)
        if equal:
            shutil.rmtree(out)
    print(f"{same} of {given.runs} ended as the undisturbed run, which took {length:.0f} s; the others are in {folder}")
    sys.exit(same != given.runs)


def kill_one(launcher: int, choice: random.Random) -> int | None:
    """Which of its processes; None where there is none any more."""
    with suppress(OSError):
        ranks = ranks_of(launcher)
        index = choice.randrange(len(ranks)) if ranks else None
        if index is not None:
            kill(ranks[index], signal.SIGKILL)
        return index
    return None


if __name__ == "__main__":
    main()
