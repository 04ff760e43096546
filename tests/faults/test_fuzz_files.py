"""Files that others made, with random harms, through every command that reads them, in forks that are guarded.

A case is a function of its kind and number: ``repeat("run", 17, make_base(base), desk)`` does one again.
"""

import json
import random
import shutil
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from codistill import recipes
from codistill.errors import RunError, printable
from codistill.runs.checkpoint import fingerprint
from codistill.runs.folder import RunFolder
from codistill.runs.seal import JSON_END, LINE_END, YAML_END, read_sealed, write_sealed
from codistill.runs.seal import seal as with_checksum
from support.cli import call
from support.exports import accept_files
from support.guard import guarded
from support.mutations import harmed
from support.pictures import write_folder, write_shards
from support.processes import started_process
from support.runs import accept_descriptions, train
from support.stress import FUZZED_FILES, Counted
from support.tiny import tiniest_recipe

SCREEN_LINES = 40
ANSWERS = (200, 204, 400, 403, 404, 408, 411, 414, 431, 501, 503, 505)
KINDS = {"run": 0.45, "export": 0.2, "picture": 0.12, "shard": 0.08, "recipe": 0.1, "request": 0.05}
"""What is harmed, and the share of all cases."""

Attempt = Callable[[], str | None]


def make_base(base: Path) -> Path:
    """A finished and an interrupted run, exports, images in a folder and in shards, and a recipe."""
    recipe = tiniest_recipe(
        networks={"a": "wrn-10-1", "b": "resnet-8"},
        data={**tiniest_recipe().data.model_dump(), "train_limit": 90, "validation": 0.2},
        checkpoints={"every_s": 1000.0, "best": True},
    )
    finished = train(recipe.replace(length={"epochs": 1}), base / "run" / "finished")
    train(recipe, base / "run" / "interrupted", steps=4)
    for name in ("safetensors", "onnx"):
        made = call("export", finished, "--network", "b", "--format", name, "--out", base / "export" / name)
        assert made.exit_code == 0, made.output
    write_folder(base / "picture", train=8, test=4, classes=2)
    write_shards(base / "picture", base / "shard")
    (base / "recipe").mkdir()
    (base / "recipe" / "recipe.yaml").write_text(recipes.dumps(recipe))
    return base


def commands(kind: str, file: Path, base: Path) -> list[list[object]]:
    """The command lines that read ``file``, which is below the folder of its kind."""
    folder = next(parent for parent in file.parents if parent.name == kind)
    part = folder / file.relative_to(folder).parts[0]
    out, photo = folder.parent / "out", min((base / "picture" / "test").rglob("*.png"))
    match kind:
        case "run":
            stored = base / "run" / part.name / "recipe.yaml"
            ended = [["evaluate", part], ["evaluate", part, "--best"]] if part.name == "finished" else []
            return [
                ["export", part, "--network", "a", "--out", out / "export"],
                ["export", part, "--network", "b", "--out", out / "best", "--best"],
                ["report", part, "-o", out / "page.html", "--patience", "1"],
                ["compare", part, base / "run" / "finished", "-o", out / "table.md"],
                ["watch", part, "--json"],
                ["watch", part, "--terminal"],
                ["train", stored, "--out", part, "--quiet"],
                *ended,
            ]
        case "export":
            return [["predict", part, photo], ["predict", part, photo, "--json", "--top", "1"]]
        case "picture":
            training = [f"data={{name: folder, folder: {folder}, image_size: 8, workers: 0}}", "length.epochs=1"]
            training += ["networks={a: resnet-8, b: resnet-8}", "augment.pad=0", "batch_size=4", "runtime.device=cpu"]
            return [
                ["predict", base / "export" / "safetensors", file],
                ["train", "quickstart", *training, "--out", out / "run"],
            ]
        case "shard":
            training = [f"data={{name: folder, folder: {folder}, image_size: 8, workers: 0}}", "length.epochs=1"]
            training += ["networks={a: resnet-8, b: resnet-8}", "augment.pad=0", "batch_size=4", "runtime.device=cpu"]
            return [["train", "quickstart", *training, "--out", out / "run"]]
    return [["show", file], ["show", file, "--json"]]


def complaint(result: Any, names: tuple[str, ...]) -> str | None:
    """What is wrong with how a command ended: it may succeed, or name the file in one message that fits a screen."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception, limit=-4))
    shown = result.stdout + result.stderr
    if printable(shown) != shown:
        return f"control characters: {shown!r:.2000}"
    if result.exit_code == 0:
        return None
    lines = result.stderr.splitlines()
    if result.exit_code not in (1, 2) or sum(line.startswith("error: ") for line in lines) > 1:
        return f"exit code {result.exit_code}: {result.stderr:.2000}"
    if result.exit_code == 2 and not any(line.startswith("error: ") for line in lines):
        return f"no message: {result.stderr:.2000}"
    if not any(name in result.stderr for name in names):
        return f"the file is not named: {result.stderr:.2000}"
    return None if len(lines) <= SCREEN_LINES else f"{len(lines)} lines: {result.stderr:.2000}"


def make_sound(file: Path) -> None:
    """Let the checksums of a run, an export or a checkpoint agree with its files, as their maker would have done."""
    if (file.parent / "recipe.yaml").exists():
        reseal(file)
        if file.name in ("data.json", "environment.json") and (file.parent / "result.json").exists():
            with suppress(RunError):  # no longer JSON
                accept_descriptions(file.parent)
    elif file.parent.name == "weights":
        result = RunFolder(file.parent.parent).result
        described = read_sealed(result)
        described["networks"][file.stem]["weights"] = fingerprint(file)
        write_sealed(result, described, sort_keys=False)
    if (file.parent / "export.json").exists():
        if file.name == "export.json":
            reseal(file)
        else:
            accept_files(file.parent)
    manifest = file.with_name("manifest.json")
    if file == manifest or not manifest.exists():
        return
    facts, content = json.loads(manifest.read_text()), file.read_bytes()
    for recorded in (facts.get("files", {}).get(file.name), facts.get(file.name)):
        if recorded is not None:
            recorded.update(bytes=len(content), sha256=sha256(content).hexdigest())
    manifest.write_text(json.dumps(facts))


def reseal(file: Path) -> None:
    """Write the checksums at the end of a file, or of its lines, anew."""
    content = file.read_bytes()
    if file.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        file.write_bytes(b"".join(with_checksum(unsealed_head(line, b', "sha256"'), LINE_END) for line in lines))
    elif file.suffix in (".json", ".yaml"):
        is_json = file.suffix == ".json"
        end = JSON_END if is_json else YAML_END
        file.write_bytes(with_checksum(unsealed_head(content, b',\n"sha256"' if is_json else b"# sha256: "), end))


def unsealed_head(content: bytes, mark: bytes) -> bytes:
    """What comes before the checksum, or before the closing brace of an object that has none."""
    return content[: content.rfind(mark)] if mark in content else content.rstrip().removesuffix(b"}").rstrip()


def prepared(kind: str, number: int, base: Path, desk: Path) -> tuple[str, Attempt, list[Path]]:
    """Harm one file of a copy; return what is done to which file, the attempt, and where it may write."""
    chance = random.Random(f"{kind} {number}")
    if kind == "request":
        return "watch", lambda: watched(chance, base), []
    shutil.copytree(base / kind, desk / kind)
    (desk / "out").mkdir()
    files = sorted(path for path in (desk / kind).rglob("*") if path.is_file() and path.name != "lock")
    (file,) = chance.choices(files, [3 if path.suffix in (".json", ".jsonl") else 1 for path in files])
    file.write_bytes(harmed(file.read_bytes(), file.suffix, chance))
    if chance.random() < 0.7:
        make_sound(file)
    arguments = chance.choice(commands(kind, file, base))
    written = [desk / "out", *([desk / "run"] if arguments[0] == "train" else [])]
    names = file.name, str(desk / kind)
    title = f"{' '.join(map(str, arguments[:1]))} of {file.relative_to(desk)}"
    return title, lambda: complaint(call(*arguments), names), written


def repeat(kind: str, number: int, base: Path, desk: Path) -> str | None:
    """Do one case; return its failure."""
    desk.mkdir()
    title, attempt, written = prepared(kind, number, base, desk)
    found = guarded(attempt, written, talks=kind == "request")
    shutil.rmtree(desk)
    return found and f"{kind} {number}, {title}: {found}"


def requests(chance: random.Random) -> bytes:
    """A request of which one part, or some bytes, are not as they should be."""
    parts = {"method": "GET", "path": "/news?since=0", "version": "HTTP/1.1", "host": "Host: 127.0.0.1", "more": "X: 1"}
    odd = [
        "",
        "x" * 70_000,
        "../../etc/passwd",
        "\r\n" * 200,
        "\x1b[2J",
        "%00%ff",
        "9" * 400,
        "\0",
        "é",
        "POST",
        "HTTP/9.9",
    ]
    odd += [
        "/news?since=%s" % ("&since=" * 9000),
        "Host: evil.example",
        "Content-Length: 99999999999",
        "A: b\r\n" * 200,
    ]
    parts[chance.choice(list(parts))] = chance.choice(odd)
    request = (
        f"{parts['method']} {parts['path']} {parts['version']}\r\n{parts['host']}\r\n{parts['more']}\r\n\r\n".encode()
    )
    return harmed(request, "", chance) if chance.random() < 0.5 else request


def watched(chance: random.Random, base: Path) -> str | None:
    """Odd requests to the live page, and then one that must be answered."""
    from codistill.report.server import RunWatcher, Server

    said = StringIO()
    with redirect_stderr(said), Server(RunWatcher([base / "run" / "finished"]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            place = server.server_address[:2]
            answers = [(request, answer(place, request)) for request in (requests(chance) for _ in range(5))]
            last = answer(place, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        finally:
            server.shutdown()
            thread.join()
    if said.getvalue():
        return said.getvalue()
    statuses = *(f"HTTP/1.0 {code} ".encode() for code in ANSWERS), b"<!doctype html>", b"<!DOCTYPE HTML>"  # HTTP/0.9
    for request, content in answers:
        if content and not content.startswith(statuses):
            return f"{request!r:.300} is answered with {content!r:.300}"
    return None if last.startswith(b"HTTP/1.0 200 ") else f"not answered after {answers!r:.2000}"


def answer(place: Any, request: bytes) -> bytes:
    with socket.create_connection(place, timeout=30) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(65536), b""))
        except (ConnectionError, BrokenPipeError):  # refused before it was read to its end
            return b""


def accept_what_is_sound(kind: str, base: Path, desk: Path) -> None:
    """Run every command on files without a harm, which also imports what the forks need."""
    if kind == "request":
        assert watched(random.Random(0), base) is None
        return
    shutil.copytree(base / kind, desk / "sound" / kind)
    for part in sorted((desk / "sound" / kind).iterdir()):
        file = next(path for path in (part, *sorted(part.rglob("*"))) if path.is_file())
        for arguments in commands(kind, file, base):
            (desk / "sound" / "out").mkdir()
            result = call(*arguments)
            assert result.exit_code == 0, (arguments, result.output, result.exception)
            shutil.rmtree(desk / "sound" / "out")


def try_all(desk: Path) -> None:
    """In a process of its own, of which every case is a fork."""
    base = make_base(desk / "base")
    failures: list[str] = []
    for kind, share in KINDS.items():
        (desk / kind).mkdir()
        accept_what_is_sound(kind, base, desk / kind)
        for number in range(round(FUZZED_FILES * share)):
            failures += filter(None, [repeat(kind, number, base, desk / kind / str(number))])
    (desk / "failures.json").write_text(json.dumps(failures))


@pytest.mark.slow(reason="a fork for each of 200 harmed files, after two trainings and two exports")
@pytest.mark.promise(
    "harmed-files",
    "Files from elsewhere with random harms, to bytes and to types, values and sizes that their formats allow, are "
    "read, or refused in words that name them: run folders, exports, images, shards, recipes, and requests to `watch`, "
    "through the commands that read them. No traceback and no hang, less than 300 MiB of memory, no code from outside "
    "the installation, no other program, nothing written outside the folders that were named.",
    repeated="{FUZZED_FILES} files",
)
def test_harmed_files_are_refused_in_words(tmp_path: Path, counted: Counted) -> None:
    process = started_process(try_all, tmp_path)
    process.join()  # every fork has its own limit
    assert process.exitcode == 0
    failures = json.loads((tmp_path / "failures.json").read_text())
    assert not failures, f"{len(failures)} of {FUZZED_FILES}:\n\n" + "\n\n".join(failures)
    counted("files with random harms, read or refused", FUZZED_FILES)
