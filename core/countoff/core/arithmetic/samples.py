"""The number of samples that an epoch and a run process over all dp_ranks.

Samples can be counted only if it is certain which batches are full; every function here returns None if it is not.
"""

from __future__ import annotations

from countoff.core.arithmetic.batches import batches_of_samples, check_count, strided_share
from countoff.core.arithmetic.facts import LoaderFacts, LoaderPass

__all__ = [
    "product",
    "resumed_batches",
    "samples_of_epoch",
    "samples_per_rank",
    "strided_pass",
    "total_samples",
]


def product(first: int | None, *others: int | None) -> int | None:
    """Returns the product; None if a factor is None."""
    found = first
    for factor in others:
        found = None if found is None or factor is None else found * factor
    return found


def samples_of_epoch(facts: LoaderFacts, batches: int | None, *, dp_degree: int) -> tuple[int | None, int | None]:
    """Returns the samples that all dp_ranks process in an epoch, and the number of different samples among them.

    Args:
        facts: What was read off the loader.
        batches: Batches of the epoch on one rank, limits included; None if unknown.
        dp_degree: Shares into which the data is cut, at least 1.
    """
    if facts.one_pass is not None:
        return _of_pass(facts.one_pass, batches, global_batch=product(facts.batch_size, dp_degree))
    used = _used(facts, batches)
    return product(used, dp_degree), _unique(facts, used, dp_degree)


def samples_per_rank(facts: LoaderFacts, batches: int | None) -> tuple[int, int] | None:
    """Returns the fewest and the most samples that one dp_rank processes in an epoch.

    Args:
        facts: What was read off the loader.
        batches: Batches of the epoch on one rank, limits included; None if unknown.
    """
    one_pass = facts.one_pass
    if one_pass is None:
        used = _used(facts, batches)
        return None if used is None else (used, used)
    cap = product(batches, facts.batch_size)
    if cap is None or one_pass.fewest_samples is None or one_pass.most_samples is None:
        return None
    return min(one_pass.fewest_samples, cap), min(one_pass.most_samples, cap)


def total_samples(
    facts: LoaderFacts,
    *,
    total_batches: int | None,
    total_steps: int | None,
    batches_per_epoch: int | None,
    samples_per_epoch: int | None,
    dp_degree: int,
) -> int | None:
    """Returns the samples of a run over all dp_ranks, repeats included; the arguments are numbers of the plan."""
    batches = total_batches
    if batches is None and batches_per_epoch is None:
        batches = product(total_steps, facts.gradient_accumulation_steps)
    if batches is None:
        return None
    return _samples_until_batch(
        facts,
        batches,
        batches_per_epoch=batches_per_epoch,
        samples_per_epoch=samples_per_epoch,
        dp_degree=dp_degree,
    )


def _samples_until_batch(
    facts: LoaderFacts, batch: int, *, batches_per_epoch: int | None, samples_per_epoch: int | None, dp_degree: int
) -> int | None:
    """Returns the samples that all dp_ranks have processed after the given number of batches."""
    batch_samples = product(facts.batch_size, dp_degree)
    if batches_per_epoch is None:
        # Such an epoch may have no end; then every batch is full if short ones are dropped.
        return product(batch, batch_samples) if facts.drop_last and facts.reported_batches is None else None
    if not batches_per_epoch:
        return 0
    epochs, rest = divmod(batch, batches_per_epoch)
    if facts.one_pass is not None and rest > facts.one_pass.full_batches:
        return None
    # Only the last batch of an epoch can be short, so all batches of an incomplete epoch are full.
    complete = product(epochs, samples_per_epoch) if epochs else 0
    incomplete = product(rest, batch_samples) if rest else 0
    return None if complete is None or incomplete is None else complete + incomplete


def strided_pass(dataset_size: int, *, batch_size: int, drop_last: bool, dp_degree: int) -> LoaderPass:
    """Returns one pass over a dataset that is sharded in turns and not filled up; the shortest share ends the pass.

    Source: ``islice(stream, dp_rank, None, dp_degree)``; ``split_dataset_by_node`` of datasets does the same with
    single examples. The last dp_rank has the fewest samples.

    Args:
        dataset_size: Samples of the dataset, at least 0.
        batch_size: Samples per dp_rank and batch, at least 1.
        drop_last: Whether each rank drops a last batch that is not full.
        dp_degree: Shares into which the data is cut, at least 1.

    Raises:
        ValueError: If a number is not an integer in its domain.

    Example:
        >>> strided_pass(33, batch_size=4, drop_last=False, dp_degree=4).uneven_batches
        (2, 3)
    """
    most = strided_share(dataset_size, parts=dp_degree, part=0)
    fewest = strided_share(dataset_size, parts=dp_degree, part=dp_degree - 1)
    fewest_batches = batches_of_samples(fewest, batch_size=batch_size, drop_last=drop_last)
    most_batches = batches_of_samples(most, batch_size=batch_size, drop_last=drop_last)
    longer = dataset_size - fewest * dp_degree  # number of shares with one sample more; shares differ by at most one
    cap = fewest_batches * batch_size
    samples = longer * min(most, cap) + (dp_degree - longer) * min(fewest, cap)
    return LoaderPass(
        batches=fewest_batches,
        fewest_batches=fewest_batches,
        most_batches=most_batches,
        full_batches=min(fewest_batches, fewest // batch_size),
        samples=samples,
        unique=samples,
        fewest_samples=fewest,
        most_samples=most,
    )


def _of_pass(one_pass: LoaderPass, batches: int | None, *, global_batch: int | None) -> tuple[int | None, int | None]:
    if batches is None or batches == one_pass.batches:
        return one_pass.samples, one_pass.unique
    # A limit ends the epoch early: how many repeats are in the remaining batches is known only if nothing repeats.
    samples = product(batches, global_batch) if batches <= one_pass.full_batches else None
    return samples, samples if one_pass.samples is not None and one_pass.samples == one_pass.unique else None


def _used(facts: LoaderFacts, batches: int | None) -> int | None:
    """Returns the samples that one dp_rank processes in an epoch."""
    if batches is None or facts.batch_size is None:
        return None
    if facts.samples_per_rank is not None:
        return min(batches * facts.batch_size, facts.samples_per_rank)
    # Any worker of an iterable dataset may end with a short batch, unless short batches are dropped.
    return batches * facts.batch_size if facts.drop_last else None


def _unique(facts: LoaderFacts, used: int | None, dp_degree: int) -> int | None:
    """Returns the number of different samples that all dp_ranks process in an epoch.

    dp_ranks take turns sample by sample, so together they process the start of the common order, in which a repeat
    comes only after the whole dataset.
    """
    if used is None or facts.dataset_size is None:
        return None
    if facts.sampling == "distributed":
        return min(used * dp_degree, facts.dataset_size)
    if facts.sampling == "replicated" and (dp_degree == 1 or used >= facts.dataset_size):
        return min(used, facts.dataset_size)
    return None


def resumed_batches(samples: int, *, batch_size: int, dp_degree: int) -> int:
    """Returns the batches that each dp_rank has done when a run resumes after the given number of samples.

    A position in batches is valid only for the dp_degree and batch size with which it was saved. A position in samples
    is valid for any, as long as it lies between two batches.

    Args:
        samples: Samples that the run has seen over all dp_ranks, at least 0.
        batch_size: Samples per dp_rank and batch after the resume, at least 1.
        dp_degree: Number of dp_ranks after the resume, at least 1.

    Raises:
        ValueError: If a number is outside its domain, or the position lies in the middle of a batch.

    Example:
        >>> resumed_batches(1024, batch_size=4, dp_degree=32)
        8
    """
    check_count("samples", samples, minimum=0)
    per_batch = check_count("batch_size", batch_size, minimum=1) * check_count("dp_degree", dp_degree, minimum=1)
    batches, rest = divmod(samples, per_batch)
    if rest:
        raise ValueError(
            f"{samples} samples are {batches} batches of {batch_size} on {dp_degree} data ranks, and {rest} over: "
            f"resume after {batches * per_batch} or {(batches + 1) * per_batch}"
        )
    return batches
