"""Tests import what they share (`reference`, …) from this folder, and leave the other cores to the other workers."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch
sys.path.insert(0, str(Path(__file__).parent))
