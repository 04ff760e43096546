"""Operations with Triton kernels: their autograd functions and launches. Knows tensors and streams, not networks."""
