"""The positions of ranks, against an enumeration of the mesh with itertools.product."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.core.ranks import RankMap


@st.composite
def rank_maps(draw: st.DrawFn) -> RankMap:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    names = tuple(f"dim{i}" for i in range(len(sizes)))
    return RankMap(names, tuple(sizes), data_dims=tuple(draw(st.lists(st.sampled_from(names), unique=True))))


def enumerated(ranks: RankMap) -> list[dict[str, int]]:
    """The coordinates of rank 0, 1, 2, … as nested loops over the dims give them."""
    return [dict(zip(ranks.names, at, strict=True)) for at in itertools.product(*map(range, ranks.sizes))]


@settings(deadline=None)
@given(rank_maps())
def test_coordinates_are_those_of_nested_loops_over_the_dims(ranks: RankMap) -> None:
    assert [ranks.coordinates(rank) for rank in range(ranks.world_size)] == enumerated(ranks)
    assert tuple(ranks.coordinates(0)) == ranks.names


@settings(deadline=None)
@given(rank_maps())
def test_dp_rank_is_the_place_among_the_data_positions_in_mesh_order(ranks: RankMap) -> None:
    data = [tuple(at[name] for name in ranks.names if name in ranks.data_dims) for at in enumerated(ranks)]
    places = sorted(set(data))
    assert ranks.dp_degree == len(places)
    assert [ranks.dp_rank(rank) for rank in range(ranks.world_size)] == [places.index(at) for at in data]


@settings(deadline=None)
@given(rank_maps())
def test_every_share_is_read_by_equally_many_peers(ranks: RankMap) -> None:
    groups = {ranks.peers(rank) for rank in range(ranks.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(ranks.world_size))
    assert {len(group) for group in groups} == {ranks.world_size // ranks.dp_degree}
    assert all(rank in ranks.peers(rank) for rank in range(ranks.world_size))


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_torchtitans_formula_holds_for_its_order_of_dims(sizes: list[int]) -> None:
    pp, replicate, shard, cp, tp = sizes
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    ranks = RankMap(names, (pp, replicate, shard, cp, tp), data_dims=("dp_shard", "dp_replicate"))
    expected = [(rank // (cp * tp)) % (replicate * shard) for rank in range(ranks.world_size)]
    assert [ranks.dp_rank(rank) for rank in range(ranks.world_size)] == expected


@pytest.mark.parametrize(("replicate", "shard"), [(8, 4), (2, 8), (2, 32), (4, 4)])
def test_every_share_of_a_replicated_and_sharded_mesh_is_read(replicate: int, shard: int) -> None:
    ranks = RankMap(("dp_replicate", "dp_shard"), (replicate, shard), data_dims=("dp_replicate", "dp_shard"))
    assert [ranks.dp_rank(rank) for rank in range(ranks.world_size)] == list(range(replicate * shard))


def test_in_plain_data_parallel_a_rank_is_its_own_dp_rank() -> None:
    ranks = RankMap.data_parallel(3)
    assert (ranks.world_size, ranks.dp_degree) == (3, 3)
    assert [(ranks.dp_rank(rank), ranks.peers(rank)) for rank in range(3)] == [(0, (0,)), (1, (1,)), (2, (2,))]


def test_without_data_dims_all_ranks_share_one_dp_rank() -> None:
    ranks = RankMap(("tp",), (4,), data_dims=())
    assert (ranks.dp_degree, ranks.peers(2)) == (1, (0, 1, 2, 3))


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0, None])
def test_a_rank_outside_the_job_is_refused(rank: object) -> None:
    ranks = RankMap.data_parallel(4)
    with pytest.raises(ValueError, match=r"rank must be an integer from 0 to 3, got "):
        ranks.dp_rank(rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "sizes", "data_dims", "message"),
    [
        ((), (), (), "equally many and at least 1"),
        (("dp",), (2, 2), ("dp",), "equally many and at least 1"),
        (("dp", "dp"), (2, 2), ("dp",), "different and not empty"),
        (("",), (2,), (), "different and not empty"),
        (("dp",), (0,), ("dp",), "the size of dim 'dp' must be an integer of at least 1, got 0"),
        (("dp",), (True,), ("dp",), "got True"),
        (("dp",), (2,), ("tp",), r"data_dims must be different names out of \('dp',\), got \('tp',\)"),
        (("dp",), (2,), ("dp", "dp"), "data_dims must be different"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused(
    names: tuple[str, ...], sizes: tuple[int, ...], data_dims: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RankMap(names, sizes, data_dims)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_a_world_without_ranks_is_refused(world_size: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RankMap.data_parallel(world_size)  # type: ignore[arg-type]
