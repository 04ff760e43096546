"""Randomness is addressed, not accumulated: every draw is a function of a seed and of what it is for.

A run that stops and continues makes the draws it would have made, because no draw depends on how many came before it.
"""

from hashlib import blake2b


def derive(seed: int, *address: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(seed, "crop", epoch)``; distinct addresses give unrelated seeds."""
    key = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in address)])
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
