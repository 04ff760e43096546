"""How the step is made fast: CUDA graph capture, bfloat16 shadow weights, networks cut into sections."""
