"""Downloads, from a server on this machine in place of the official one."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from codistill.data import cifar, download
from codistill.data.load import load
from support.fake_cifar import FakeCifar

Make = Callable[[str], FakeCifar]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files take the place of the official site's."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(cifar, "OFFICIAL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_is_checked_unpacked_and_found(
    make_cifar: Make, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = make_cifar("cifar100")
    archive = fake.pack(monkeypatch)
    archive.rename(served / archive.name)
    target = tmp_path / "new" / "cache"
    assert cifar.download("cifar100", target) == target / "cifar-100-python"
    assert "100%" in capfd.readouterr().err
    assert len(load("cifar100", folder=target).train) == 50
    (served / archive.name).unlink()
    assert cifar.download("cifar100", target) == target / "cifar-100-python", "what is there is not fetched again"


def test_a_download_with_another_checksum_is_refused(served: Path, tmp_path: Path) -> None:
    (served / "cifar-10-python.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="c58f30108f718f92721af3b95e74349a"):
        cifar.download("cifar10", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_says_so(served: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar10: cannot download http.*cifar-10-python.tar.gz to .*404"):
        cifar.download("cifar10", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_only_cifar_can_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown data set to download 'cifar1'; did you mean 'cifar10'\?"):
        cifar.download("cifar1", tmp_path)


def test_where_data_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path))
    assert download.data_folder("/somewhere") == Path("/somewhere")
    assert download.data_folder() == tmp_path
    monkeypatch.delenv("CODISTILL_DATA")
    assert download.data_folder().name == "codistill"
