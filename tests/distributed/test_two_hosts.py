"""Two hosts, as network namespaces joined by a cable: they train, and survive a cut as docs/distributed.md says."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from codistill import recipes
from support.processes import in_new_process
from support.ranks import LAUNCHED
from support.runs import checksums, train
from support.stress import STRESS

HOSTS = {"codistill0": "10.77.0.1", "codistill1": "10.77.0.2"}


def ip(*arguments: str, host: str | None = None) -> int:
    command = ["ip", *(["-n", host] if host else []), *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.fixture
def hosts() -> Iterator[None]:
    first, second = HOSTS
    if not shutil.which("ip") or ip("netns", "add", first):
        pytest.skip("needs the right to make network namespaces")
    try:
        failed = ip("netns", "add", second)
        failed |= ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for host, address in HOSTS.items():
            failed |= ip("addr", "add", f"{address}/24", "dev", "cable", host=host)
            failed |= ip("link", "set", "cable", "up", host=host) | ip("link", "set", "lo", "up", host=host)
        if failed:
            pytest.skip("needs the right to join network namespaces")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "delete", host)


def start(rank: int, out: Path) -> "subprocess.Popen[str]":
    """Starts a rank as a launcher on its host would; only the first host has the folder."""
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": HOSTS["codistill0"],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "cable",
    }
    folder = out if rank == 0 else out.parent / "not-here"
    command = ["ip", "netns", "exec", f"codistill{rank}", sys.executable, "-m", "codistill", "train", *LAUNCHED]
    return subprocess.Popen(
        [*command, "--timeout=15", "--out", str(folder)],
        env={**os.environ, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(not STRESS, reason="takes a minute; set CODISTILL_STRESS=1")
def test_a_cut_cable_ends_both_and_the_same_command_continues(hosts: None, tmp_path: Path) -> None:
    out, alone = tmp_path / "run", tmp_path / "alone"
    ranks = [start(rank, out) for rank in range(2)]
    assert ranks[0].stdout is not None
    next(line for line in ranks[0].stdout if line.startswith("epoch 1/"))
    ip("link", "set", "cable", "down", host="codistill0")
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode == 0 for rank in ranks] == [False, False], said
    assert "warning: the ranks meet at 10.77.0.1" in said[0]
    assert "rank 1 (b)" in said[0].splitlines()[-1]
    assert not (out / "result.json").exists()

    ip("link", "set", "cable", "up", host="codistill0")
    time.sleep(1)
    again = [start(rank, out) for rank in range(2)]
    ended = [rank.communicate(timeout=120) for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], ended
    assert "continues after epoch" in ended[0][0]
    assert in_new_process(train, recipes.get(LAUNCHED[0], LAUNCHED[1:]), alone) == 0
    assert checksums(out) == checksums(alone)
    assert not (tmp_path / "not-here").exists()
