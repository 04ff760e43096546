"""Memory that other processes write to and that a GPU copies from without a stop in between."""

import mmap
import os
import tempfile
import weakref

import torch

from codistill.log import log


class SharedMemory:
    """``size`` bytes that a process started with ``descriptor`` can map too. They have no name, so nothing is left over
    when everybody is killed; and they are not in /dev/shm, of which containers give little."""

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("codistill")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self.map = mmap.mmap(self.descriptor, size)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self._is_pinned = False

    def pin(self) -> None:
        """Keep the pages where they are, so that the GPU copies them by itself while the host goes on."""
        if self._is_pinned:
            return
        self._is_pinned = True
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.tensor.data_ptr()
        status = int(cudart.cudaHostRegister(address, self.size, 0))
        if status:
            log.warning("%d MB cannot be pinned (CUDA error %d): copies wait for the host", self.size >> 20, status)
        else:
            weakref.finalize(self, cudart.cudaHostUnregister, address)
