"""An sbatch file for a training that may take longer than the cluster lets a job run. Imports no torch."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

NOTICE_S = 120
"""How long before the end Slurm is asked to say so: enough for a step, a save and torchrun's own end."""

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={nproc}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{notice_s}
# Add what your cluster wants to know: --partition, --account, --gpus-per-node, and the environment to activate.

out={out}
told=
tell() {{ told=yes; kill -TERM "$training" 2>/dev/null; }}
trap tell USR1 TERM    # the time is nearly up, or another job goes first: save

# A fresh store for every restart; with torchrun's shared one, restarted processes may wait for the dead.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={nproc} --max-restarts=3 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" \\
    -m codistill {command} --out "$out" &
training=$!
wait "$training"
[ -n "$told" ] && wait "$training"    # the first wait ended with the signal

# Only who was told to stop queues again: what failed would fail again.
if [ -n "$told" ] && [ ! -e "$out/result.json" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
[ -e "$out/result.json" ]
"""


def sbatch(arguments: Sequence[str], out: Path, *, name: str, nodes: int, nproc: int, time: str) -> str:
    """``arguments`` are those of ``codistill``, without ``--out``."""
    if not re.fullmatch(r"(\d+-)?\d{1,3}(:\d\d){0,2}", time):
        raise ValueError(f"--time {time}: give it as Slurm takes it, [D-]HH:MM:SS, as in 1-12:00:00")
    return TEMPLATE.format(
        name=name,
        nodes=nodes,
        nproc=nproc,
        time=time,
        notice_s=NOTICE_S,
        out=shlex.quote(str(out)),
        command=shlex.join(arguments),
    )
