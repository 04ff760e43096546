"""``codistill train --nproc``, torchrun and Slurm: runs that are started, killed, stopped and misconfigured."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from codistill import recipes
from codistill.cli.app import app
from codistill.distributed.launch import launch, local_store
from codistill.distributed.layout import LayoutRequest, check_request
from codistill.distributed.rendezvous import is_loopback
from codistill.engine.signals import LAUNCHER, is_orphaned
from support.processes import in_new_process
from support.ranks import LAUNCHED
from support.runs import checksums, train

CODISTILL = [sys.executable, "-m", "codistill"]


@contextmanager
def started(*command: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(stream: IO[str] | None, beginning: str) -> str:
    assert stream is not None
    return next(line for line in stream if line.startswith(beginning))


def ranks_under(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert in_new_process(train, recipes.get(LAUNCHED[0], LAUNCHED[1:]), out) == 0
    return dict(checksums(out))


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_killed_stopped_and_continued_it_ends_as_if_undisturbed(undisturbed: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*CODISTILL, "train", *LAUNCHED, "--nproc=2", "--out", str(out)]
    with started(*command) as training:
        line_of(training.stdout, "epoch 1/6")
        os.kill(ranks_under(training.pid)[0], signal.SIGKILL)
        line_of(training.stdout, "epoch 3/6")
        training.send_signal(signal.SIGINT)
        output, errors = training.communicate(timeout=120)
    assert training.returncode == 75, errors
    assert "Stopped; everything is saved." in output
    assert "rank 0 was killed by SIGKILL; all ranks restart from the last checkpoint (restart 1 of 3)" in errors

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks: a | b" in ended.stdout
    assert checksums(out) == undisturbed
    again = CliRunner().invoke(app, command[3:])
    assert (again.exit_code, f"{out} is finished already" in again.stdout) == (0, True)


def attempt(script: str, restarts: int = 0) -> int:
    return launch(["sh", "-c", script], processes=3, restarts=restarts, stop=lambda: False)


def test_all_ranks_restart_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 is killed in the first two attempts; the others notice and end with 1."""
    script = (
        f'cd {tmp_path}; echo "$MASTER_ADDR $WORLD_SIZE" >> "rank-$RANK"; [ $(wc -l < "rank-$RANK") = 3 ] && exit 0; '
        '[ "$RANK" = 1 ] && kill -KILL $$; sleep 0.2; exit 1'
    )
    assert attempt(script, restarts=2) == 0
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(3)] == ["127.0.0.1 3\n" * 3] * 3
    assert [message.split(";")[0] for message in caplog.messages] == ["rank 1 was killed by SIGKILL"] * 2
    for rank in range(3):
        (tmp_path / f"rank-{rank}").unlink()
    with pytest.raises(ValueError, match="rank 1 was killed by SIGKILL; what was saved is intact"):
        attempt(script, restarts=1)


def test_a_stop_that_comes_too_early_is_a_stop(caplog: pytest.LogCaptureFixture) -> None:
    """A signal ends a rank that has not installed its handlers yet."""
    assert launch(["sleep", "60"], processes=2, restarts=3, stop=lambda: True) == 0
    assert caplog.messages == [
        "rank 0 was killed by SIGTERM; rank 1 was killed by SIGTERM while stopping; what was saved before is intact"
    ]


def test_a_failed_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(ValueError, match="rank 2 ended with exit code 3; what was saved is intact"):
        attempt('[ "$RANK" = 2 ] && exit 3; sleep 0.2')


def test_a_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 reports wrong input; rank 1 is stopped, and rank 2 ignores SIGTERM."""
    monkeypatch.setattr("codistill.distributed.launch.GRACE_S", 0.5)
    script = (
        f"echo $$ > {tmp_path}/$RANK; case $RANK in 0) sleep 0.3; exit 2;; 1) kill -STOP $$;; esac; "
        "trap '' TERM; exec sleep 60"
    )
    assert attempt(script, restarts=3) == 2
    pids = [(tmp_path / f"{rank}").read_text().strip() for rank in range(3)]
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False] * 3


def test_wrong_input_is_reported_once_and_not_retried(tmp_path: Path) -> None:
    """The folder is found to be another's only when all ranks have started."""
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [*CODISTILL, "train", *LAUNCHED, "--nproc=2", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("error: ") == 1
    assert f"error: rank 0 (a): {tmp_path} contains files that are not a run's" in ended.stderr
    assert "restart" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc=3", "--shards=1"], "3 processes for 2 networks"),
        (["--nproc=0"], "0 processes; give at least 1"),
        (["--nproc=3", "--split=a,b"], "needs 2 processes or a multiple; there are 3"),
        (["--nproc=2", "--split=a,x"], "unknown network in the split 'x'"),
        (["--split=a,b"], "add --nproc N"),
        (["batch_size=none", "--nproc=2"], "batch_size"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", *LAUNCHED, *options, "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_torchrun_starts_it_too(undisturbed: dict[str, str], tmp_path: Path) -> None:
    """And restarts it, although its store, which all attempts share, still has the addresses of dead ranks."""
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    with started(*torchrun, "-m", "codistill", "train", *LAUNCHED, "--out", str(out)) as training:
        line_of(training.stdout, "epoch 2/6")
        if sys.platform == "linux":
            os.kill(ranks_under(training.pid)[1], signal.SIGKILL)
        output, errors = training.communicate(timeout=120)
    assert training.returncode == 0, errors
    assert f"result   {out / 'result.json'}" in output
    assert checksums(out) == undisturbed


@pytest.mark.promise(
    "port",
    "When another program has the port at which ranks meet, and does not answer, every rank ends within `--timeout`, "
    "with exit code 2, the address and what to type.",
    repeated="both, rank 0 and another",
)
@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (0, "its port is in use; choose another MASTER_PORT"),
        (1, "nothing answers there within 1 s; start rank 0 .* or choose another port"),
    ],
)
def test_a_port_that_another_program_has_is_reported_by_every_rank(
    rank: int, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The program accepts connections and never answers; it only ends to end a test that would wait for ever."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for variable, value in place.items():
            monkeypatch.setenv(variable, str(value))
        limit = threading.Timer(60, lambda: taken.shutdown(socket.SHUT_RDWR))
        limit.start()
        ended = CliRunner().invoke(app, ["train", *LAUNCHED, "--timeout=1", "--out", str(tmp_path / "run")])
        assert limit.is_alive(), "it waited until the program ended"
        limit.cancel()
    assert ended.exit_code == 2
    assert re.search(f"error: rank {rank} cannot meet the other ranks at localhost:{port}: {reason}", ended.stderr)
    assert not (tmp_path / "run").exists()


def test_the_example_is_for_four_processes() -> None:
    example = Path(__file__).parents[2] / "examples" / "four_networks.yaml"
    recipe = recipes.resolve(str(example), [])
    check_request(recipe, 4, LayoutRequest())
    assert len(set(recipe.networks.values())) == 4
    assert f"codistill train examples/{example.name} --nproc 4" in example.read_text()


@pytest.mark.parametrize(("launcher", "orphaned"), [(os.getpid, True), (os.getppid, False)])
def test_a_rank_without_its_launcher_is_orphaned(
    launcher: Callable[[], int], orphaned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is its own parent; without our launcher there are no orphans."""
    assert not is_orphaned()
    monkeypatch.setenv(LAUNCHER, str(launcher()))
    assert is_orphaned() is orphaned


@pytest.mark.skipif(sys.platform != "linux", reason="finds sockets in /proc")
def test_the_store_listens_on_loopback_only() -> None:
    """Another host must not be able to join a training on one machine."""
    with local_store() as port:
        sockets = [
            line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()
        ]
    listening = [place for _, place, _, state, *_ in sockets if state == "0A" and place.endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("n1", False)],
)
def test_only_loopback_is_trusted(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


FAKES = {
    "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else echo "$@" >> "$LOG"; fi',
    "srun": 'echo "srun $@" >> "$LOG"; trap "echo saved >> $LOG; exit 0" TERM; '
    'if [ "$END" = finish ]; then mkdir -p runs/twins; touch runs/twins/result.json; exit 0; fi; '
    'if [ "$END" = fail ]; then exit 2; fi; while :; do sleep 0.05; done',
}


@pytest.mark.parametrize(("end", "code", "requeued"), [("finish", 0, False), ("fail", 1, False), ("", 1, True)])
def test_the_sbatch_script_of_the_docs_requeues_only_a_stopped_run(
    end: str, code: int, requeued: bool, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    script = page.split("```bash\n#!/bin/bash\n")[1].split("```")[0]
    log = tmp_path / "log"
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "71234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "END": end, **slurm}
    with subprocess.Popen(["bash", "-c", script], env=environment, cwd=tmp_path) as job:
        if requeued:
            until = time.monotonic() + 60
            while not log.exists() and time.monotonic() < until:
                time.sleep(0.05)
            job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == code
    lines = log.read_text().splitlines()
    assert lines[0].startswith("srun torchrun --nnodes=2 ")
    assert "--rdzv-endpoint=n1:21234 -m codistill train cifar100/wrn-28-10-twins " in lines[0]
    assert lines[1:] == (["saved", "requeue 71234"] if requeued else [])
