"""Operations with Triton kernels: their autograd functions and launches. Knows tensors and streams, not networks.

``dispatch`` chooses between them and torch, ``NAME.py`` has an operation's autograd function and launches, and
``_NAME_triton.py`` its kernels. Conventions, those of Triton's tutorials where they have one:

* Feature maps are channels last: a matrix [M, C] of M = B × H × W pixels. Weights are [C_OUT, 3, 3, C_IN].
* Grid axis 0 runs over channel blocks or tiles, axis 1 over programs that share the rows of a reduction.
* ``x_ptr``, ``offs_m``, ``mask``, ``BLOCK_M``: pointers, offsets, bounds, tile sizes; ``dy``, ``dx``, ``dw``, ``db``:
  gradients of output, input, weight and bias. Row strides (``x_stride``) are in units of UNIT elements, which is a
  constant of the kernel, so that the compiler can vectorise loads.
* All sums have a fixed order: two runs on one device give the same bits. Sums are float32.
* Launches pass their arguments by name. Every kernel docstring has its grid and the layout of its arguments.
* benchmarks/NOTES.md has what each kernel gains; one that gains little is not worth its lines.
"""
