"""What ranks raised by themselves, grouped to one account."""

import json

import pytest

from countoff.core.protocol.failures import Failure, alike, told_as_one


def test_a_failure_is_read_back_from_its_record() -> None:
    failure = Failure("ValueError: torn", "train.py:41", "in batch 4", 1700000000.25)
    read = Failure.from_json(json.loads(json.dumps(failure.to_json())))
    assert (read, read.time) == (failure, failure.time)


def test_a_failure_of_another_version_is_read() -> None:
    assert Failure.from_json("raised ValueError: torn (in batch 4)").event == "raised ValueError: torn (in batch 4)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: 'label'", "KeyError: 'target'"),
        ("FileNotFoundError: [Errno 2] No such file: '/data/a.npy'", "FileNotFoundError: [Errno 2] No such file: 'b'"),
        ("RuntimeError: shape [4, 7] is invalid", "RuntimeError: shape [4, 10] is invalid"),
        ("TypeError: <Model object at 0x7f3060f116f0>", "TypeError: <Model object at 0x7f30aaaa16f0>"),
    ],
)
def test_one_mistake_has_names_and_numbers_of_each_rank(one: str, other: str) -> None:
    assert alike({0: Failure(one, "train.py:1"), 1: Failure(other, "train.py:1")}) == [[0, 1]]


@pytest.mark.parametrize(
    "other",
    [
        Failure("KeyError: 'label'", "train.py:2"),
        Failure("IndexError: 'label'", "train.py:1"),
        Failure("RuntimeError: CUDA out of memory", "train.py:1"),
    ],
)
def test_another_line_type_or_text_is_another_mistake(other: Failure) -> None:
    assert alike({0: Failure("KeyError: 'label'", "train.py:1"), 1: other}) == [[0], [1]]


def test_what_differs_between_ranks_is_left_out() -> None:
    words = [f"ValueError: rank {rank} of 4: \"a\" is not '/data/{rank}.npy'" for rank in range(4)]
    failures = {rank: Failure(each) for rank, each in enumerate(words)}
    assert told_as_one(failures) == "raised ValueError: rank … of 4: \"a\" is not '/data/…'"


def test_the_batch_of_one_rank_is_told_with_its_number() -> None:
    failures = {rank: Failure("ValueError: torn", "train.py:1", f"in batch {rank}") for rank in (3, 4)}
    assert told_as_one(failures) == "raised ValueError: torn at train.py:1 (rank 3 in batch 3)"
