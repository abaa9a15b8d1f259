"""Numbers of samples and batches: the pure functions behind ``countoff.core.arithmetic.plan``.

They take and return integers and need no torch. Each function names the code whose arithmetic it repeats, and was
compared with what that code does when it runs. Numbers are rounded only where that code rounds them.
"""

from __future__ import annotations

__all__ = [
    "batches_of_samples",
    "check_count",
    "checked_limit",
    "distributed_samples_per_rank",
    "limited_batches",
    "size_for_length",
    "strided_share",
]


def check_count(name: str, value: object, *, minimum: int) -> int:
    """Returns a count, or refuses a bad argument.

    Args:
        name: The name of the argument in the error.
        value: The count.
        minimum: The smallest value that is allowed.

    Raises:
        ValueError: If the value is not an int, is a bool, or is below the minimum.

    Example:
        >>> check_count("batch_size", 4, minimum=1)
        4
    """
    if type(value) is not int or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return value


def distributed_samples_per_rank(dataset_size: int, *, dp_degree: int, drop_last: bool) -> int:
    """Returns the samples that a distributed sampler yields to each dp_rank per epoch, repeats included.

    Source: ``torch.utils.data.DistributedSampler.__init__``. Without drop_last the order is filled up to a multiple of
    dp_degree with samples from its beginning; with drop_last the end is cut. (Its ``ceil((N - W) / W)`` is ``N // W``.)

    Args:
        dataset_size: Samples of the dataset, or of the sampler that is sharded; at least 0.
        dp_degree: Shards (``num_replicas``), at least 1.
        drop_last: The sampler's own flag, not the loader's.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> distributed_samples_per_rank(10, dp_degree=4, drop_last=False)
        3
    """
    check_count("dataset_size", dataset_size, minimum=0)
    check_count("dp_degree", dp_degree, minimum=1)
    return dataset_size // dp_degree if drop_last else -(-dataset_size // dp_degree)


def batches_of_samples(samples: int, *, batch_size: int, drop_last: bool) -> int:
    """Returns the batches that one loader, or one of its workers, makes of its samples in one pass.

    Source: ``torch.utils.data.BatchSampler.__len__`` for a sampler, ``_IterableDatasetFetcher`` for an iterable.

    Args:
        samples: Samples that this loader or worker gets in one pass, at least 0.
        batch_size: Samples per batch, at least 1.
        drop_last: Whether a last batch that is not full is dropped.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> batches_of_samples(10, batch_size=4, drop_last=False)
        3
    """
    check_count("samples", samples, minimum=0)
    check_count("batch_size", batch_size, minimum=1)
    return samples // batch_size if drop_last else -(-samples // batch_size)


def strided_share(samples: int, *, parts: int, part: int) -> int:
    """Returns the samples that one part takes from a sequence in strides: the length of ``sequence[part::parts]``.

    Source: Python's slicing, as in ``islice(stream, rank, None, world_size)``; used among ranks and among workers.

    Args:
        samples: Length of the sequence, at least 0.
        parts: Ranks or workers that share it, at least 1.
        part: The rank or worker, from 0 up to, but not including, parts.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> strided_share(10, parts=4, part=1)
        3
    """
    check_count("samples", samples, minimum=0)
    check_count("parts", parts, minimum=1)
    if check_count("part", part, minimum=0) >= parts:
        raise ValueError(f"part must be below parts, got part {part} of {parts}")
    return len(range(part, samples, parts))


def checked_limit(limit: object) -> int | float | None:
    """Returns a limit on the batches of an epoch, or refuses a bad argument.

    Args:
        limit: Batches (int, at least 0), a fraction of the epoch (float, 0.0 to 1.0), or None for no limit.

    Raises:
        ValueError: If the limit is none of these.

    Example:
        >>> checked_limit(0.5)
        0.5
    """
    if limit is None:
        return None
    if not isinstance(limit, float):
        return check_count("limit_batches", limit, minimum=0)
    if not 0.0 <= limit <= 1.0:
        raise ValueError(f"limit_batches as a fraction must be from 0.0 to 1.0, got {limit}")
    return limit


def limited_batches(batches: int | None, limit: int | float | None) -> int | None:
    """Returns the batches of an epoch after a limit.

    Source: Lightning's ``_parse_num_batches``: an int is a number of batches, a float is a fraction of the length,
    rounded down. ``1`` and ``1.0`` are different limits.

    Args:
        batches: Batches per epoch and rank, at least 0; None for a loader without a length.
        limit: Batches (int, at least 0), a fraction (float, 0 to 1), or None for no limit.

    Returns:
        Batches per epoch and rank; None without a length and without a limit in batches.

    Raises:
        ValueError: If the limit is outside its domain, is a fraction below 1.0 of an unknown length, or is a fraction
            above 0.0 that leaves no batch of a loader that has some. Lightning refuses the last two as well.

    Example:
        >>> limited_batches(5, 0.5), limited_batches(5, 3), limited_batches(None, 3)
        (2, 3, 3)
    """
    if batches is not None:
        check_count("batches", batches, minimum=0)
    checked_limit(limit)
    if limit is None:
        return batches
    if isinstance(limit, int):
        return limit if batches is None else min(batches, limit)
    if batches is None:
        if limit != 1.0:
            raise ValueError(f"limit_batches must be 1.0 or an int for a loader without a length, got {limit}")
        return None
    left = int(batches * limit)
    if batches and limit and not left:
        raise ValueError(f"limit_batches must leave at least 1 of {batches} batches, got {limit}")
    return left


def size_for_length(reported_batches: int, *, true_batches: int, dp_degree: int) -> bool:
    """Returns whether a reported length can be that of the whole dataset, although it should be that of one dp_rank.

    Both numbers are rounded, so their ratio is seldom dp_degree exactly. Whatever drop_last is in sampler and loader,
    the length of the whole dataset is less than dp_degree away from ``true_batches * dp_degree``. Near a true length of
    1 many other lengths are this near too, so this is a likely cause and no proof.

    Args:
        reported_batches: Batches per epoch that the framework reports, at least 0.
        true_batches: Batches of one dp_rank per epoch, at least 0.
        dp_degree: Shares into which the data is cut, at least 1.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> size_for_length(834882, true_batches=52181, dp_degree=16)
        True
    """
    check_count("reported_batches", reported_batches, minimum=0)
    check_count("true_batches", true_batches, minimum=0)
    check_count("dp_degree", dp_degree, minimum=1)
    return reported_batches > true_batches and abs(reported_batches - true_batches * dp_degree) < dp_degree
