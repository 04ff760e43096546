"""What is installed is whole, and who may import whom is what docs/design.md says."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "codistill"

# Each part with what it may import besides itself and the leaves; arrows point one way.
LEAVES = {"errors", "randomness", "hardware", "log"}
OPS = {"ops"}
NETWORKS, TRANSFER = {"networks"} | OPS, {"transfer"}
COHORT = {"cohort"} | NETWORKS | TRANSFER
RECIPES = {"recipes"} | NETWORKS | TRANSFER
DATA = {"data"} | RECIPES
RUNS = {"runs"} | RECIPES
ENGINE = {"engine"} | RUNS | COHORT | DATA
STUDIES = {"studies"} | ENGINE
EXPORT = {"export"} | ENGINE
REPORT = {"report"} | STUDIES
TRACKERS = {"trackers"} | ENGINE
DISTRIBUTED = {"distributed"} | ENGINE
ALLOWED = {
    "errors": set(),
    "randomness": set(),
    "hardware": set(),
    "log": set(),
    "ops": OPS,
    "networks": NETWORKS,
    "transfer": TRANSFER,
    "data": DATA,
    "cohort": COHORT,
    "recipes": RECIPES,
    "runs": RUNS,
    "engine": ENGINE,
    "studies": STUDIES,
    "export": EXPORT,
    "report": REPORT,
    "trackers": TRACKERS,
    "distributed": {"__version__"} | DISTRIBUTED,
    "cli": {"cli", "__version__"} | REPORT | EXPORT | TRACKERS | DISTRIBUTED,
    "__init__": {"cli"} | REPORT | EXPORT | TRACKERS,
    "__main__": {"cli"},
}


def imported_parts(file: Path) -> set[str]:
    """The parts of ours that a file imports, wherever in the file."""
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "codistill":
            assert node.level == 0, f"{file}: imports are absolute"
            deeper = node.module.split(".")[1:]
            parts |= {deeper[0]} if deeper else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("codistill.")}
    return parts


def test_arrows_point_one_way() -> None:
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 80
    for file in files:
        part = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        # What the package offers at its top may be named by it: `from codistill import recipes`.
        strange = imported_parts(file) - ALLOWED[part] - LEAVES
        assert not strange, f"{file.relative_to(ROOT)} imports {sorted(strange)}, which its layer may not"


# Modules whose distribution has another name, or that always come with it; triton does where there is one.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "triton": "torch",
    "pydantic_core": "pydantic",
}


def imported_modules(file: Path) -> set[str]:
    """The top-level modules that a file imports, wherever in the file."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in (*project["dependencies"], *extras)}
    imported = {module for file in SOURCE.rglob("*.py") for module in imported_modules(file)}
    foreign = imported - set(sys.stdlib_module_names) - {"codistill"}
    assert len(foreign) > 15
    undeclared = {module for module in foreign if DISTRIBUTIONS.get(module, module) not in declared}
    assert not undeclared


@pytest.mark.slow(reason="packs the checkout")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout knows which files belong to it")
def test_the_sdist_has_all_that_the_checkout_has(tmp_path: Path) -> None:
    """So that packagers can run the tests, which read results, figures and documentation."""
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)  # type: ignore[arg-type]
    (sdist,) = tmp_path.glob("codistill-*.tar.gz")
    with tarfile.open(sdist) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = {name for name in listed.stdout.split("\0") if name and not name.startswith(".ci/")}
    assert len(tracked) > 400
    assert not tracked - packed


@pytest.mark.slow(reason="builds a wheel and installs it")
def test_the_wheel_is_whole_and_installs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("codistill-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"codistill/{file.relative_to(SOURCE).as_posix()}" for file in SOURCE.rglob("*.py")}
    assert sources <= names
    assert {"codistill/py.typed", "codistill/data/fashion/fashion.npz", "codistill/data/fashion/LICENSE"} <= names
    kinds = {".jinja", ".css", ".js"}
    pages = {f"codistill/{file.relative_to(SOURCE).as_posix()}" for file in SOURCE.rglob("*") if file.suffix in kinds}
    assert len(pages) >= 8
    assert pages <= names
    assert not [name for name in names if "test" in name.lower() or name.endswith(".pyc")]

    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(install, check=True, capture_output=True)  # type: ignore[arg-type]
    code = "import codistill, codistill.data.embedded as e; print(codistill.__file__, len(e.read().train))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": ""},
    )
    where, images = ran.stdout.split()
    assert where.startswith(str(target))
    assert images == "6000"


def test_every_part_logs_to_the_one_logger() -> None:
    """A handler on ``codistill`` gets everything: no part opens a logger of its own."""
    openers = [file for file in SOURCE.rglob("*.py") if 'getLogger("codistill' in file.read_text()]
    assert [file.relative_to(SOURCE).as_posix() for file in openers] == ["log.py"]
