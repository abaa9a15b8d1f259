"""Measures how long the rank map of a large job takes: ``python benchmarks/rank_map.py [RANKS]``.

This is plain integer arithmetic on one core: no torch, no process group.
"""

import statistics
import sys
import time
from collections.abc import Callable

from countoff.core.arithmetic.ranks import RankMap

REPEATS = 9


def median_milliseconds(work: Callable[[], object]) -> float:
    """Returns the median time of the work over several repeats."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1000


def main() -> None:
    """Times a map with pipeline, replica, shard, context and tensor dimensions."""
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
    ranks = RankMap.of("torchtitan", world_size=world_size, pp=4, dp_replicate=8, cp=2, tp=8)
    computed = ranks.dp_ranks()
    works: dict[str, Callable[[], object]] = {
        "all dp_ranks at once": ranks.dp_ranks,
        "dp_rank of each rank, one by one": lambda: [ranks.dp_rank(rank) for rank in range(world_size)],
        "the peers of one rank": lambda: ranks.peers(world_size // 2),
        "check of all dp_ranks": lambda: ranks.faults(computed),
    }
    print(f"{world_size:,} ranks, {ranks.dp_degree:,} shares; median of {REPEATS}")
    for name, work in works.items():
        print(f"  {name:<34}{median_milliseconds(work):>9.2f} ms")


if __name__ == "__main__":
    main()
