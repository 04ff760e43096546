"""Trainings that share one import of torch: a server forks a child for each, which runs `codistill train`.

Importing torch takes longer than training a toy. The study starts a process as usual; that process sends its arguments
and its output to the server, and exits with the training's code.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from codistill.recipes import parse
from codistill.studies.runner import Command, train_command
from support.synthetic import FINISH, fill

# argv: the socket.
SERVER = """
import json, os, signal, socket, sys
import codistill.cli.train, codistill.engine.trainer
import torch._dynamo  # what torch's optimizers import when they are first used
from codistill.cli import main

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are not waited for
while True:
    connection, _ = listener.accept()
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        message, (output,), _, _ = socket.recv_fds(connection, 2**16, 1)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = json.loads(message)
        code = 1
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stdout.flush()
            connection.sendall(str(code or 0).encode())
            os._exit(0)
    connection.close()
"""

# argv: the socket, then the arguments of the training.
CLIENT = """
import json, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
socket.send_fds(connection, [json.dumps(sys.argv[1:]).encode()], [1])
sys.exit(int(connection.recv(16) or 1))
"""


@contextmanager
def warm_trainings(folder: Path) -> Iterator[Command]:
    """A command for studies while the server runs."""
    address = str(folder / "socket")
    with subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

        def command(recipe_file: Path, run: Path) -> Sequence[str]:
            python, _, _, *arguments = train_command(recipe_file, run)
            return [python, "-S", "-E", "-c", CLIENT, address, *arguments]

        try:
            yield command
        finally:
            server.terminate()


# A recipe of the catalogue differs from the next mostly in these, which tests of recipes and first losses compare.
NOT_OF_A_KIND = ("name", "networks", "optimizer", "schedule", "seed")


def first_of_each_kind(train: Command) -> Command:
    """A command that trains the first recipe of each kind; a later one gets that run's result with its own recipe."""
    trained: dict[str, Path] = {}

    def command(recipe_file: Path, run: Path) -> Sequence[str]:
        parsed = parse.load(recipe_file)
        recipe = parsed.model_dump(mode="json")
        settings = {key: value for key, value in recipe.items() if key not in NOT_OF_A_KIND}
        kind = json.dumps([list(recipe["networks"]), settings], sort_keys=True)
        done = trained.setdefault(kind, run) / "result.json"
        if not done.exists():  # the first, or the first is still training
            return train(recipe_file, run)
        result = {**json.loads(done.read_text()), "recipe": recipe}
        for name, network in recipe["networks"].items():
            result["networks"][name]["network"] = network
        copy = run.parents[1] / "copied" / run.name
        fill(copy, parsed, result)
        return [sys.executable, "-S", "-E", "-c", FINISH, str(recipe_file), str(run), str(copy)]

    return command
