"""The live page: served to this machine alone, from files that it only reads, renewed without a reload."""

import http.client
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from codistill.report import server as server_module
from codistill.report.server import VERSION, RunWatcher, Server
from codistill.runs.folder import RunFolder
from support.browser import Tab
from support.made_up import append, made_up_run, quick, record
from support.tiny import tiny_recipe


def serving(folder: Path) -> Server:
    server = Server(RunWatcher([folder]), port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_up_run(tmp_path / "run", quick(), epochs=3)


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    server = serving(run)
    yield server
    server.shutdown()
    server.server_close()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, str, str]:
    """The status, the version and the text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers.get(VERSION, ""), text


def test_it_listens_on_the_loopback_address_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.server_address[1]}/"


def test_news_come_only_when_there_are_any(server: Server, run: Path) -> None:
    status, version, text = get(server, "/")
    assert (status, "3 of 12" in text) == (200, True)
    assert get(server, f"/news?since={version}") == (204, version, "")
    append(run, record(quick(), 4))
    status, newer, text = get(server, f"/news?since={version}")
    assert (status, "4 of 12" in text) == (200, True)
    assert newer != version


def test_what_has_not_changed_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    news = RunWatcher([run])
    first = news.page()
    monkeypatch.setattr(server_module, "read_overview", lambda *_: pytest.fail("no file has changed"))
    assert news.page() == first


def test_other_names_for_this_machine_are_refused(server: Server) -> None:
    """A site that points its own name at our address must not read the page."""
    assert get(server, "/", host="evil.example")[0] == 403
    assert get(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert get(server, "/../../etc/passwd")[0] == 404


def test_a_run_that_is_moved_away_is_an_answer_not_a_crash(server: Server, run: Path) -> None:
    run.rename(run.with_name("elsewhere"))
    status, _, text = get(server, "/news")
    assert (status, "no such file or folder" in text) == (503, True)
    run.with_name("elsewhere").rename(run)
    assert get(server, "/news")[0] == 200


def test_a_port_in_use_is_said_with_what_to_do(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} is in use; choose another, or leave it out"):
            Server(RunWatcher([run]), port)


def test_connections_are_bounded_in_time_and_number(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send half a request lose their connection, and neither hold threads nor keep others out."""
    assert server_module.Handler.timeout == server_module.TIMEOUT_S == 10, "what SECURITY.md promises"
    monkeypatch.setattr(server_module.Handler, "timeout", 0.5)
    server, before = serving(run), threading.active_count()
    half_open = []
    for _ in range(200):
        half_open.append(socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30))
        half_open[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
    assert threading.active_count() - before <= server_module.MAX_CONNECTIONS
    assert get(server, "/")[0] == 200
    assert [client.recv(1) for client in half_open] == [b""] * 200
    for client in half_open:
        client.close()
    server.shutdown()
    server.server_close()


def test_clients_that_never_ask_do_not_keep_others_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time limit of their own: clients that send a byte now and then never exceed it."""
    monkeypatch.setattr(server_module.Handler, "timeout", None)
    monkeypatch.setattr(server_module, "HURRIED_S", 0.1)
    server = serving(run)
    place = "127.0.0.1", server.server_address[1]
    silent = [socket.create_connection(place, timeout=30) for _ in range(2 * server_module.MAX_CONNECTIONS)]
    assert get(server, "/")[0] == 200
    for client in silent:
        client.close()
    server.shutdown()
    server.server_close()


def test_many_clients_at_once_are_all_answered(server: Server) -> None:
    with ThreadPoolExecutor(300) as clients:
        statuses = [one[0] for one in clients.map(lambda _: get(server, "/"), range(300))]
    assert statuses == [200] * 300


def test_a_client_that_hangs_up_prints_nothing(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Barrier(2)
    monkeypatch.setattr(server.news, "page", lambda: (begun.wait(30), begun.wait(30), ("1", "x" * 2**24))[2])
    client = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    begun.wait(30)
    client.close()
    begun.wait(30)
    monkeypatch.undo()
    assert get(server, "/")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_open_page_follows_the_journal(tab: Tab, server: Server, run: Path) -> None:
    """New epochs appear without a reload, and what the reader has hidden stays hidden."""
    tab.open(server.address).draw_all()
    chart = tab.page.locator("[data-chart=error]")
    chart.locator(".legend button").first.click()
    tab.page.evaluate("window.same = true")
    for epoch in (4, 5):
        append(run, record(quick(), epoch))
    tab.wait("charts.get('error').spec.series[0].x.length === 5")
    assert "5 of 12" in tab.page.locator("#results").text_content()
    assert chart.locator("[data-series]").count() == 1
    assert tab.page.evaluate("window.same") is True
    assert "live, news of" in tab.page.locator("#pulse").text_content()
    assert tab.errors == []
    assert all(request.startswith(server.address) for request in tab.requests)


def test_the_page_of_an_empty_run_fills_as_it_learns(tab: Tab, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "empty", quick(), epochs=0)
    server = serving(run)
    tab.open(server.address)
    assert tab.page.locator("[data-chart=error]").count() == 0
    append(run, record(quick(), 1))
    tab.page.wait_for_selector("[data-chart=error]")
    tab.draw_all()
    assert tab.page.locator("[data-chart=error] [data-series]").count() == 2
    server.shutdown()
    server.server_close()
    tab.wait("document.getElementById('pulse').textContent.includes('does not answer')")


TRAINING = """
import sys
def refuse(event, arguments):
    assert event not in ("socket.bind", "socket.connect"), f"a training opened a socket: {arguments}"
sys.addaudithook(refuse)
from codistill.cli import main
main()
"""


def test_a_training_is_watched_from_its_first_epoch_to_its_last(tab: Tab, tmp_path: Path) -> None:
    """The training runs by itself, and could not open a socket if it wanted to."""
    recipe = tiny_recipe(length={"epochs": 4}, evaluation={"all_every_epochs": 4})
    RunFolder(tmp_path).write_recipe(recipe)
    run = made_up_run(tmp_path / "run", recipe, epochs=0)
    command = [sys.executable, "-c", TRAINING, "train", tmp_path / "recipe.yaml", "--out", run, "--quiet"]
    server = serving(run)
    tab.open(server.address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as training:  # type: ignore[arg-type]
        said, _ = training.communicate(timeout=120)
    assert training.returncode == 0, said
    tab.wait("charts.get('error')?.spec.series[0].x.length === 4")
    tab.wait("document.getElementById('results').textContent.includes('finished')")
    tab.draw_all()
    shown = tab.page.evaluate("charts.get('error').spec.series.map((series) => series.y)")
    journal = [line for line in (run / "journal.jsonl").read_text().splitlines() if line]
    assert [len(values) for values in shown] == [4, 4]
    assert len(journal) == 4
    assert tab.errors == []
    server.shutdown()
    server.server_close()


def test_the_command_says_where_it_serves_and_what_it_cost(run: Path) -> None:
    command = [sys.executable, "-m", "codistill", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        address = watching.stdout.readline().split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        watching.send_signal(2)
        rest, errors = watching.communicate(timeout=60)
    assert re.fullmatch(r"Watching took \d+\.\d\d CPU seconds\.\n", rest)
    assert (watching.returncode, errors) == (0, "")
