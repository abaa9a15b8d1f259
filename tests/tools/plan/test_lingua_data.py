"""What lingua's data ranks really read, line by line, against the check of its configuration.

The rules are lingua's, written again: each data rank reads one chunk file. With fewer files than ranks, n ranks share a
file and each reads every n-th line of it. With more files than ranks, the last files are not read.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from countoff.core.arithmetic.ranks import RankMap, dp_rank_faults
from countoff.plan.checks import check_job
from countoff.plan.readers import read_job

LINES = 64


def write_chunks(directory: Path, chunks: int) -> None:
    """Writes files of numbered documents, as lingua's data preparation does."""
    directory.mkdir()
    for chunk in range(chunks):
        lines = [json.dumps({"text": f"{chunk} {line}"}) for line in range(LINES)]
        (directory / f"{directory.name}.chunk.{chunk:02}.jsonl").write_text("\n".join(lines) + "\n")


def documents(directory: Path, dp_rank: int, dp_degree: int) -> list[str]:
    """The documents that a rank with this dp_rank reads in one pass.

    Raises:
        IndexError: If there is no such share.
    """
    files = sorted(directory.glob("*.chunk.*.jsonl"))[:dp_degree]
    per_file = dp_degree // len(files)
    shares = [(file, offset) for file in files for offset in range(per_file)]
    file, offset = shares[dp_rank]
    return [json.loads(line)["text"] for line in file.read_text().splitlines()[offset::per_file]]


def wrong_dp_rank(rank: int, replicas: int, shards: int) -> int:
    """Lingua's formula before its fix, with the number of replicas where the number of shards is right."""
    return rank // shards * replicas + rank % shards


def check(directory: Path, **sizes: int) -> list[str]:
    """The faults that the check of a lingua configuration over this data finds."""
    world_size = sizes.pop("world_size")
    dims = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    text = f"""
steps: 1000
optim: {{warmup: 10}}
distributed: {{fsdp_type: full_shard, {dims}}}
data: {{batch_size: 2, seq_len: 128, root_dir: {directory.parent}, sources: {{{directory.name}: 1.0}}}}
"""
    (directory.parent / "lingua.yaml").write_text(text)
    issues = check_job(read_job(str(directory.parent / "lingua.yaml")), world_size=world_size)
    return [issue.line for issue in issues if issue.is_fault]


@pytest.mark.parametrize(
    ("replicas", "shards", "unread"), [(2, 8, "37.5 %"), (2, 32, "46.9 %"), (3, 8, "41.7 %"), (2, 4, "25 %")]
)
def test_the_unread_data_of_a_wrong_factor_is_reported(tmp_path: Path, replicas: int, shards: int, unread: str) -> None:
    """The check reports the fraction of the data that a simulation of lingua's loader leaves unread."""
    degree = replicas * shards
    write_chunks(tmp_path / "books", replicas)
    wrong = [wrong_dp_rank(rank, replicas, shards) for rank in range(degree)]
    read = Counter(one for dp_rank in wrong for one in documents(tmp_path / "books", dp_rank, degree))
    total = replicas * LINES
    assert f"{100 * (total - len(read)) / total:.3g} %" == unread
    repeated = f"{100 * sum(count > 1 for count in read.values()) / total:.3g} %"
    faults = dp_rank_faults(wrong, dp_degree=degree)
    found = check(tmp_path / "books", world_size=degree, dp_replicate=replicas, dp_shard=shards)
    assert len(found) == 1
    assert found[0].startswith("silent  dp-rank: ")
    for text in (str(faults), found[0]):
        assert f"{unread} of the data is never read; {repeated} of the data is read more than once" in text


def test_more_replicas_than_shards_leave_ranks_without_a_share(tmp_path: Path) -> None:
    write_chunks(tmp_path / "books", 8)
    wrong = [wrong_dp_rank(rank, 8, 4) for rank in range(32)]
    crashed = []
    for rank, dp_rank in enumerate(wrong):
        try:
            documents(tmp_path / "books", dp_rank, 32)
        except IndexError:
            crashed.append(rank)
    assert (len(crashed), crashed[0], max(wrong)) == (16, 16, 59)
    found = check(tmp_path / "books", world_size=32, dp_replicate=8, dp_shard=4)
    assert len(found) == 1
    assert found[0].startswith("stops   dp-rank: ")
    assert "16 of 32 ranks have a dp_rank outside 0 to 31 (rank 16: 32, the largest 59)" in found[0]


@pytest.mark.parametrize(("replicas", "shards", "chunks"), [(2, 8, 4), (8, 4, 8), (2, 32, 16), (3, 8, 12), (4, 4, 1)])
def test_with_the_right_factor_every_document_is_read_once(
    tmp_path: Path, replicas: int, shards: int, chunks: int
) -> None:
    write_chunks(tmp_path / "books", chunks)
    ranks = RankMap.of("lingua", world_size=replicas * shards, dp_shard=shards)
    read = [
        one
        for rank in range(ranks.world_size)
        for one in documents(tmp_path / "books", ranks.dp_rank(rank), ranks.dp_degree)
    ]
    assert len(read) == len(set(read)) == chunks * LINES


def test_chunks_beyond_the_data_ranks_are_never_read(tmp_path: Path) -> None:
    write_chunks(tmp_path / "books", 20)
    read = {one for dp_rank in range(8) for one in documents(tmp_path / "books", dp_rank, 8)}
    assert 20 * LINES - len(read) == 768
    (found,) = check(tmp_path / "books", world_size=8, dp_replicate=8)
    assert "lingua reads the first 8, and 12 (60 % of the files) are never read" in found
