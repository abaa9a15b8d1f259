"""The positions of ranks, against an enumeration of the mesh with itertools.product."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.arithmetic.ranks import ORDERS, RankMap, dp_rank_faults
from countoff.core.checks.rank_map import judge_dp_ranks


@st.composite
def rank_maps(draw: st.DrawFn) -> RankMap:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    names = tuple(f"dim{i}" for i in range(len(sizes)))
    return RankMap(names, tuple(sizes), data_dims=tuple(draw(st.lists(st.sampled_from(names), unique=True))))


def enumerated(ranks: RankMap) -> list[dict[str, int]]:
    """The coordinates of rank 0, 1, 2, … as nested loops over the dims give them."""
    return [dict(zip(ranks.names, at, strict=True)) for at in itertools.product(*map(range, ranks.sizes))]


@given(rank_maps())
def test_coordinates_are_those_of_nested_loops_over_the_dims(ranks: RankMap) -> None:
    assert [ranks.coordinates(rank) for rank in range(ranks.world_size)] == enumerated(ranks)
    assert tuple(ranks.coordinates(0)) == ranks.names


@given(rank_maps())
def test_dp_rank_is_the_index_of_the_data_position(ranks: RankMap) -> None:
    """The dp_rank is the index of a rank's position along the data dims, in the order of the mesh."""
    data = [tuple(at[name] for name in ranks.names if name in ranks.data_dims) for at in enumerated(ranks)]
    places = sorted(set(data))
    assert ranks.dp_degree == len(places)
    assert [ranks.dp_rank(rank) for rank in range(ranks.world_size)] == [places.index(at) for at in data]
    assert ranks.dp_ranks() == [places.index(at) for at in data]


@given(rank_maps(), st.data())
def test_one_size_is_inferred_from_the_others(ranks: RankMap, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ranks.sizes) - 1))
    sizes = [-1 if index == place else size for index, size in enumerate(ranks.sizes)]
    assert RankMap.fit(ranks.names, sizes, ranks.data_dims, world_size=ranks.world_size) == ranks


@given(rank_maps(), st.data())
def test_any_numbering_is_sound_and_any_change_is_not(ranks: RankMap, data: st.DataObject) -> None:
    """Any numbering of the shares is accepted, and a change to one rank of it is found."""
    numbers = data.draw(st.permutations(range(ranks.dp_degree)))
    computed = [numbers[ranks.dp_rank(rank)] for rank in range(ranks.world_size)]
    assert ranks.faults(computed).sound
    rank = data.draw(st.integers(0, ranks.world_size - 1))
    wrong = data.draw(st.integers(-2, ranks.dp_degree + 1).filter(lambda value: value != computed[rank]))
    changed = {**dict(enumerate(computed)), rank: wrong}
    faults = ranks.faults(changed)
    assert not faults.sound
    named = [*faults.out_of_range, *itertools.chain(*faults.repeated.values(), *faults.split)]
    assert rank in named or computed[rank] in faults.missing


@given(rank_maps(), st.data())
def test_faults_match_an_enumeration_of_the_shares(ranks: RankMap, data: st.DataObject) -> None:
    """The faults are those that an enumeration of the readers of every share finds."""
    everybody, degree = range(ranks.world_size), ranks.dp_degree
    computed = data.draw(st.lists(st.integers(0, degree), min_size=len(everybody), max_size=len(everybody)))
    groups = [ranks.dp_rank(rank) for rank in everybody]
    faults = dp_rank_faults(computed, dp_degree=degree, groups=groups)
    readers = {share: {groups[rank] for rank in everybody if computed[rank] == share} for share in range(degree)}
    assert set(faults.missing) == {share for share, who in readers.items() if not who}
    assert set(faults.repeated) == {share for share, who in readers.items() if len(who) > 1}
    assert set(faults.out_of_range) == {rank for rank in everybody if computed[rank] == degree}
    apart = {group for group in groups if len({computed[rank] for rank in everybody if groups[rank] == group}) > 1}
    assert {groups[rank] for pair in faults.split for rank in pair} == apart


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
    ranks = RankMap(("dp",), (3,), ("dp",))
    assert (ranks.world_size, ranks.dp_degree) == (3, 3)
    assert [ranks.dp_rank(rank) for rank in range(3)] == [0, 1, 2]


def test_without_data_dims_all_ranks_share_one_dp_rank() -> None:
    ranks = RankMap(("tp",), (4,), data_dims=())
    assert (ranks.dp_degree, ranks.dp_ranks()) == (1, [0, 0, 0, 0])


@pytest.mark.parametrize("rank", [-1, 4, True, 1.0, None])
def test_a_rank_outside_the_job_is_refused(rank: object) -> None:
    ranks = RankMap(("dp",), (4,), ("dp",))
    with pytest.raises(ValueError, match=r"rank must be an integer from 0 to 3, got "):
        ranks.dp_rank(rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "sizes", "data_dims", "message"),
    [
        ((), (), (), "the same length of at least 1"),
        (("dp",), (2, 2), ("dp",), "the same length of at least 1"),
        (("dp", "dp"), (2, 2), ("dp",), "different and not empty"),
        (("",), (2,), (), "different and not empty"),
        (("dp",), (0,), ("dp",), "the size of dim 'dp' must be an integer of at least 1, got 0"),
        (("dp",), (True,), ("dp",), "got True"),
        (("dp",), (2,), ("tp",), r"data_dims must be different names out of \('dp',\), got \('tp',\)"),
        (("dp",), (2,), ("dp", "dp"), "data_dims must be different"),
    ],
)
def test_a_contradictory_map_is_refused(
    names: tuple[str, ...], sizes: tuple[int, ...], data_dims: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RankMap(names, sizes, data_dims)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_a_world_without_ranks_is_refused(world_size: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RankMap.of("lingua", world_size=world_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ((-1, -1), 4, r"only one size may be -1, got dp and tp in dp -1 × tp -1"),
        ((-1, 3), 4, r"dp -1 × tp 3: the other sizes multiply to 3, which does not divide world_size 4"),
        ((2, 3), 4, r"dp 2 × tp 3 = 6, but world_size is 4"),
        ((-1, 0), 4, "the size of dim 'tp' must be an integer of at least 1, got 0"),
        ((-1, 1), 0, "world_size must be an integer of at least 1, got 0"),
        ((-1, 8), 4, "multiply to 8, which does not divide world_size 4"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(sizes: tuple[int, int], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankMap.fit(("dp", "tp"), sizes, ("dp",), world_size=world_size)


@pytest.mark.parametrize(
    ("replicate", "shard", "never", "twice"),
    [(2, 8, 0.375, 0.375), (2, 32, 30 / 64, 30 / 64), (3, 8, 10 / 24, 8 / 24)],
)
def test_the_wrong_factor_leaves_that_part_of_the_data_unread(
    replicate: int, shard: int, never: float, twice: float
) -> None:
    ranks = RankMap.of("lingua", world_size=replicate * shard, dp_replicate=replicate, dp_shard=shard)
    computed = [rank // shard * replicate + rank % shard for rank in range(ranks.world_size)]
    faults = dp_rank_faults(computed, dp_degree=ranks.dp_degree)
    assert (faults.never_read, faults.read_twice, len(faults.out_of_range)) == (never, twice, 0)
    assert len(set(computed)) == replicate * (replicate - 1) + shard
    assert len(faults.missing) == (replicate - 1) * (shard - replicate)


def test_the_wrong_factor_can_be_out_of_range() -> None:
    """With more replicas than shards, the wrong factor gives dp_ranks out of range."""
    ranks = RankMap.of("lingua", world_size=32, dp_replicate=8, dp_shard=4)
    faults = ranks.faults([rank // 4 * 8 + rank % 4 for rank in range(32)])
    assert "16 of 32 ranks have a dp_rank outside 0 to 31 (rank 16: 32, the largest 59)" in str(faults)


def test_dividing_by_tp_alone_is_wrong_with_cp() -> None:
    """With context parallel, the rank divided by the tensor-parallel size alone is a wrong dp_rank."""
    ranks = RankMap.of("megatron", world_size=16, tp=2, cp=2)
    faults = ranks.faults([rank // 2 for rank in range(16)])
    assert "must read the same data and have different dp_ranks" in str(faults)
    assert "ranks 0 and 2" in str(faults)


def test_the_rank_as_dp_rank_is_wrong_with_tp() -> None:
    """With tensor parallel, the rank itself is a wrong dp_rank."""
    ranks = RankMap.of("deepspeed", world_size=8, model=2)
    faults = ranks.faults(range(8))
    assert "4 of 8 ranks have a dp_rank outside 0 to 3" in str(faults)


def test_a_dp_rank_of_too_many_ranks_is_found() -> None:
    """A dp_rank of too many ranks is found also if it is not known which ranks share data."""
    assert dp_rank_faults([0, 0, 1, 1], dp_degree=2).sound
    faults = dp_rank_faults([0, 0, 0, 1], dp_degree=2)
    assert "ranks 0–2 read the same dp_rank 0" in str(faults)


@pytest.mark.parametrize("values", [[0, 1], [0, 1, 2, 3, 4], {0: 0, 1: 1, 2: 2, 4: 3}, []])
def test_a_dp_rank_for_every_rank_is_required(values: object) -> None:
    with pytest.raises(ValueError, match="one dp_rank for each of the ranks 0 to 3"):
        RankMap(("dp",), (4,), ("dp",)).faults(values)  # type: ignore[arg-type]


def test_a_dp_rank_that_is_no_number_is_out_of_range() -> None:
    faults = RankMap(("dp",), (2,), ("dp",)).faults([0, None])  # type: ignore[list-item]
    assert "rank 1: None" in str(faults)


def test_every_order_has_one_share_per_data_position() -> None:
    """In every framework's order, each position along the data dims has a dp_rank of its own."""
    for name, order in ORDERS.items():
        sizes = dict.fromkeys(order.names, 2)
        ranks = RankMap.of(name, world_size=2 ** len(sizes), **sizes)
        data = [tuple(at[dim] for dim in order.data_dims) for at in enumerated(ranks)]
        # One number for every position along the data dims, another one for each.
        assert len({(at, ranks.dp_rank(rank)) for rank, at in enumerate(data)}) == len(set(data)) == ranks.dp_degree


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_megatrons_notation_is_fastest_first(dp: int, tp: int, cp: int, pp: int) -> None:
    ranks = RankMap.of("tp-cp-ep-dp-pp", world_size=dp * tp * cp * pp, tp=tp, cp=cp, pp=pp)
    assert ranks.names == ("pp", "dp", "cp", "tp")
    expected = [(rank // (tp * cp)) % dp for rank in range(ranks.world_size)]
    assert [ranks.dp_rank(rank) for rank in range(ranks.world_size)] == expected
    inside = RankMap.of("tp-cp-pp-dp", world_size=dp * tp * cp * pp, tp=tp, cp=cp, pp=pp)
    assert [inside.dp_rank(rank) for rank in range(ranks.world_size)] == [
        rank // (tp * cp * pp) for rank in range(ranks.world_size)
    ]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("torchtitn", "unknown order of dims 'torchtitn'; did you mean torchtitan?"),
        ("tp-pp", "needs dp"),
        ("tp-tp-dp", "at most once"),
        ("tp-xp-dp", "at most once"),
    ],
)
def test_an_unknown_order_is_refused(order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        RankMap.of(order, world_size=4)


def test_an_unknown_dim_of_an_order_is_refused() -> None:
    with pytest.raises(ValueError, match="the order 'lingua' has no dim 'cp'; it has dp_replicate, dp_shard, tp"):
        RankMap.of("lingua", world_size=4, cp=2)


def test_65_536_ranks_are_checked() -> None:
    ranks = RankMap.of("torchtitan", world_size=65_536, pp=8, dp_replicate=16, cp=4, tp=8)
    assert ranks.faults([(rank // 32) % 256 for rank in range(65_536)]).sound


def plans(loaders: list[object], dp_ranks: list[int], dp_degree: int) -> dict[int, dict[str, object]]:
    """What ranks send to the roll call if both their mesh and their loader have a share of the data."""
    both = zip(loaders, dp_ranks, strict=True)
    return {
        rank: {"dp_rank": dp_rank, "dp_degree": dp_degree, "loader_position": loader}
        for rank, (loader, dp_rank) in enumerate(both)
    }


@pytest.mark.parametrize(
    ("loaders", "text"),
    [
        ([[0, 2], [0, 2], [1, 2], [1, 2]], ""),
        # Another numbering of the shares reads the same.
        ([[1, 2], [1, 2], [0, 2], [0, 2]], ""),
        ([[0, 2], [0, 2], [1, 2], None], ""),
        ([None, None, None, None], ""),
        ([[0, 2], [1, 2], [0, 2], [1, 2]], "ranks 0 and 1 must read the same data and have different dp_ranks"),
        ([[0, 4], [1, 4], [2, 4], [3, 4]], "among 4 ranks, and the mesh has 2 data ranks: ranks that must read the sa"),
        ([[0, 1], [0, 1], [0, 1], [0, 1]], "among 1 rank, and the mesh has 2 data ranks: every sample is read by more"),
        ([[0, 2], [0, 2], [1, 2], [0, 1]], "among 1 rank or 2 ranks, and the mesh has 2 data ranks: every sample"),
        (["01", "01", "12", "12"], ""),
    ],
)
def test_loaders_that_disagree_with_the_mesh_are_found(loaders: list[object], text: str) -> None:
    """Loaders that read other shares than those of the mesh give a RankMapError."""
    verdict = judge_dp_ranks(plans(loaders, [0, 0, 1, 1], 2))
    assert (verdict is None) == (not text)
    if verdict is not None:
        assert verdict.kind == "RankMapError"
        assert text in verdict.sentence


def test_a_sampler_over_one_node_reads_data_twice() -> None:
    """A sampler that counts the ranks of one node lets every node read the same data."""
    verdict = judge_dp_ranks(plans([[rank % 8, 8] for rank in range(16)], list(range(16)), 16))
    assert verdict is not None
    assert "among 8 ranks, and the mesh has 16 data ranks: every sample is read by more than one" in verdict.sentence
    assert verdict.ranks == tuple(range(16))
