"""Ranks of one attempt find each other although earlier attempts have left their tokens in the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from codistill.distributed.rendezvous import agree_on_prefix

RANKS = 4


def all_join(store: HashStore) -> set[str]:
    with ThreadPoolExecutor(RANKS) as threads:
        return set(threads.map(lambda rank: agree_on_prefix(store, rank, RANKS, timeout_s=30), range(RANKS)))


def test_every_attempt_has_a_prefix_of_its_own() -> None:
    store, attempts = HashStore(), 20
    prefixes = [all_join(store) for _ in range(attempts)]
    assert all(len(prefix) == 1 for prefix in prefixes)
    assert len(set.union(*prefixes)) == attempts


def test_an_absent_rank_is_named() -> None:
    store = HashStore()
    all_join(store)  # its tokens remain in the store
    with ThreadPoolExecutor(RANKS) as threads:
        joined = {rank: threads.submit(agree_on_prefix, store, rank, RANKS, 1.0) for rank in (0, 1, 3)}
        with pytest.raises(ValueError, match="rank 2 did not join within 1 s"):
            joined[0].result()
    with pytest.raises(ValueError, match="rank 0 did not join within"):
        agree_on_prefix(store, 1, RANKS, 0.1)
