"""The cause of each kind of issue that ``countoff check`` finds, and what to do, for ``countoff explain``."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ADVICE", "Advice"]


class Advice(NamedTuple):
    """What is said of one kind of issue.

    Attributes:
        cause: How a configuration comes to have it, and what follows.
        remedy: What to do.
    """

    cause: str
    remedy: str


ADVICE = {
    "dims": Advice(
        "The sizes of the mesh do not multiply to the number of ranks, or what the others leave for the size that is "
        "-1 is no whole number.",
        "Change one of the sizes or the number of ranks; the line has the product.",
    ),
    "batch": Advice(
        "A global batch is no multiple of the samples per batch × the data ranks, which are fewer than the ranks if "
        "some share data; or a batch on the way to the full one is none, and the run stops there.",
        "Take one of the nearest numbers in the line, or leave one of the three out, so that it follows.",
    ),
    "dp-rank": Advice(
        "lingua's train.py before January 2025 multiplies by dp_replicate where dp_shard is right, so that several "
        "ranks read one share and others are read by none.",
        "Correct the formula in your train.py as the line says; if it is right there, use --ignore dp-rank.",
    ),
    "chunks": Advice(
        "lingua gives whole files to data ranks, and leaves out files above the number of data ranks.",
        "Split the data into as many chunks as there are data ranks.",
    ),
    "warm-up": Advice(
        "The warm-up takes as long as the run or the schedule, often because the run was made shorter, so that the "
        "learning rate never decays; or the scheduler has no warm-up.",
        "Make the warm-up much shorter than the run, or choose a scheduler that has one.",
    ),
    "horizon": Advice(
        "The length of the schedule is that of another run, or counts batches where the schedule counts steps. The "
        "learning rate reaches its end too early, or never.",
        "Set the length of the schedule to the steps of the run, or leave it out.",
    ),
    "uneven": Advice(
        "The data is not filled up to a multiple of the data ranks, so that one rank is out of data before the others.",
        "Fill the shares up, repeat the data, or end every rank after the fewest batches.",
    ),
    "override": Advice(
        "A value cannot hold or has no effect, such as a Trainer's lr_scheduler_type beside a scheduler of DeepSpeed, "
        "and the framework takes another one without an error.",
        "Write the value that the framework takes, or change the others so that yours fits.",
    ),
    "micro-batches": Advice(
        "A batch is cut into micro-batches, for a pipeline or to save memory, and versions differ in what the sizes "
        "mean.",
        "Nothing, if the numbers of countoff plan are those that you mean.",
    ),
    "machines": Advice(
        "Accelerate counts the processes of all machines together, and rounds those of each machine down.",
        "Set num_processes to the processes of one machine × num_machines.",
    ),
    "world-size": Advice(
        "The configuration is written for another number of ranks than the one given as a flag.",
        "Change one of the two; leave the flag out to check the number of the configuration.",
    ),
    "unknown-field": Advice(
        "The name is misspelt. DeepSpeed ignores it and takes its default; other frameworks stop on it.",
        "Take the name that the line proposes; if the field is your own, use --ignore unknown-field.",
    ),
    "text": Advice(
        "YAML as PyYAML reads it needs a dot and a signed exponent in such a number: 1e-5 is text, and the run stops "
        "with a TypeError when it computes with it. OmegaConf reads 1e-5 as a number.",
        "Write it as the line does, such as 1.0e-5.",
    ),
    "first-step": Advice(
        "lingua's warm-up begins at 0, so its first step changes no weight.",
        "Nothing, if you know it. A run that is to be extended needs its full length from the start.",
    ),
    "data-ranks": Advice(
        "Tensor, context and pipeline parallel ranks work on the same samples.",
        "Count samples and tokens over the data ranks alone, as countoff plan does.",
    ),
    "length": Advice(
        "The data is too small for one batch on each data rank; or steps and epochs are both set, and one ends the "
        "run; or nothing says how long an epoch or a sample is.",
        "Keep one length, and give the flag that the line asks for. If there is no step, use smaller batches or more "
        "data.",
    ),
    "repeats": Advice(
        "The dataset does not divide by the data ranks, and is filled up with samples from the start of its order.",
        "Nothing in training; in an evaluation, leave the repeated samples out.",
    ),
    "dropped": Advice(
        "A last batch that is not full is dropped.",
        "Nothing in training with shuffled data; to see every sample, keep short batches.",
    ),
}
"""By the code of the issue."""
