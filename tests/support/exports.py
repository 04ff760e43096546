"""Scripts that use an exported network without codistill, our own and those of docs/export.md; a pt2 file with code."""

import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from codistill.export.bundle import LABELS, MANIFEST, MODELS, PREPROCESSING, VERSION
from codistill.runs.seal import sha256_of, write_sealed

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
ALONE = """
import sys
sys.modules["codistill"] = None
try:
    import codistill
except ImportError:
    pass
else:
    raise SystemExit("codistill can be imported")
"""
CLASSIFY = {
    "pt2": """
import numpy as np, torch
with torch.no_grad():
    np.save("logits.npy", torch.export.load(sys.argv[1]).module()(torch.from_numpy(np.load("images.npy"))).numpy())
""",
    "onnx": """
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
np.save("logits.npy", session.run(None, {"images": np.load("images.npy")})[0])
""",
}
SCRIPTS = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def run(script: str, folder: Path, *arguments: str, alone: bool = True) -> str:
    """What a script prints in a process of its own, one that has no codistill if it is to be alone."""
    command = [sys.executable, "-c", (ALONE if alone else "") + script, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def with_code(archive: bytes, table: str, key: str) -> bytes:
    """Copies a pt2 archive; the spec of its inputs names a module, which torch imports to read it: ``table[key]``."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        parts = {name: source.read(name) for name in source.namelist()}
    (model,) = (name for name in parts if name.endswith("models/model.json"))
    program = json.loads(parts[model])
    signature = program["graph_module"]["module_call_graph"][0]["signature"]
    protocol, spec = json.loads(signature["in_spec"])
    spec["context"] = json.dumps({"__enum__": True, "fqn": table, "name": key})
    signature["in_spec"] = json.dumps([protocol, spec])
    parts[model] = json.dumps(program).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name, content in parts.items():
            target.writestr(name, content)
    return out.getvalue()


def accept_files(export: Path) -> None:
    """Records the files of an export as they are now in its manifest, as an attacker can."""
    (model,) = {path.name for path in export.iterdir()} & MODELS.keys()
    files = {name: sha256_of(export / name) for name in (model, LABELS, PREPROCESSING)}
    write_sealed(export / MANIFEST, {"codistill_export": VERSION, "model": model, "files": files})
