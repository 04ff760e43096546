"""Values and tensors from one process to another: JSON and raw bytes, nothing that could execute."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from codistill.runs.checkpoint import DTYPES
from codistill.runs.files import to_json

_DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in DTYPES}


def send_value(value: object, to: int) -> None:
    content = _encoded(value)
    dist.send(torch.tensor([len(content)]), to)
    dist.send(content, to)


def receive_value(source: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    content = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(content, source)
    return _decoded(content)


def gather_values(value: object) -> list[Any]:
    """Everybody's value, by rank, for everybody."""
    content, ranks = _encoded(value), range(dist.get_world_size())
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(lengths, torch.tensor([len(content)]))
    longest = int(max(lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = content
    contents = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(contents, padded)
    return [_decoded(content[: int(length)]) for content, length in zip(contents, lengths, strict=True)]


def send_tensors(tensors: Mapping[str, Tensor], to: int) -> None:
    """First what they are and how they lie in memory, then one after the other in the same order."""
    send_value({name: [str(x.dtype), list(x.shape), list(x.stride())] for name, x in tensors.items()}, to)
    for x in tensors.values():
        dist.send(_bytes(x.detach().cpu().contiguous()), to)


def receive_tensors(source: int) -> dict[str, Tensor]:
    return {name: _receive_tensor(source, *kind) for name, kind in receive_value(source).items()}


def _receive_tensor(source: int, dtype: str, shape: list[int], stride: list[int]) -> Tensor:
    received = torch.empty(shape, dtype=_DTYPES[dtype])
    dist.recv(_bytes(received), source)
    return torch.empty_strided(shape, stride, dtype=received.dtype).copy_(received)


def _bytes(contiguous: Tensor) -> Tensor:
    return contiguous.view(-1).view(torch.uint8)


def _encoded(value: object) -> Tensor:
    return torch.frombuffer(bytearray(to_json(value, sort_keys=False).encode()), dtype=torch.uint8)


def _decoded(content: Tensor) -> Any:
    return json.loads(bytes(content.tolist()))
