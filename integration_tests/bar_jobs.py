"""Jobs of 8 batches an epoch on each of two ranks, and what each framework's progress bar draws of them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from integration_tests.digits import own_rank, share_loader
from integration_tests.lightning_jobs import quiet

Options = Mapping[str, Any] | None
Drawn = tuple[int, int | None]
"""How many batches a bar counts, and of how many; None if it shows no total."""
Draws = Callable[[Options], list[Drawn]]
"""Trains with these options of countoff, or without it; returns what was drawn."""


def lightning(bar: str) -> dict[str, Draws]:
    """Those of Lightning's bar of this kind."""
    from integration_tests.lightning_totals_jobs import Case, TooLong, fitted, stream, whole

    proven = Case(partial(whole, 64, TooLong), bar=bar, trainer={"max_epochs": 2})
    jobs = {
        "stream": replace(proven, train=partial(stream, 8)),
        "wrong": replace(proven, train=partial(stream, 8, reported=16)),
        "proven": proven,
        "resumed": replace(proven, resumes_after=3),
        "evaluation": replace(proven, train=partial(stream, 8), val=[partial(stream, 3)]),
    }

    def draws(name: str, options: Options) -> list[Drawn]:
        of = "Validation" if name == "evaluation" else "Epoch"
        return [(done, total) for kind, done, total in fitted(jobs[name], options).drawn if kind.startswith(of)]

    return {name: partial(draws, name) for name in jobs}


def transformers() -> dict[str, Draws]:
    """Those of the Trainer's bar, which counts the steps of the run."""
    from integration_tests.trainer_jobs import Job

    unshared = {"accelerator_config": {"dispatch_batches": False}}
    jobs = {
        "stream": Job(batches=[8, 8], args={"max_steps": 16, **unshared}),
        "wrong": Job(batches=[8, 8], reported=[16, 16], args=unshared),
        "resumed": Job(batches=[8, 8], reported=[16, 16], args=unshared, resume=True),
    }

    def draws(name: str, options: Options) -> list[Drawn]:
        job, resume, drawn = replace(jobs[name], options=options), None, io.StringIO()
        if job.resume:
            job.trainer(save_strategy="steps", save_steps=3, max_steps=3)[0].train()
            resume = "out/checkpoint-3"
        trainer, *_ = job.trainer(disable_tqdm=False)
        with contextlib.redirect_stderr(drawn), contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume)
        return numbers(r"\| (\d+)/(\d+) \[", drawn.getvalue())

    return {name: partial(draws, name) for name in jobs}


def composer(*, console: bool) -> dict[str, Draws]:
    """Those of Composer's bar, or of its console."""
    from composer.loggers import ProgressBarLogger

    from integration_tests.composer_jobs import Job
    from integration_tests.composer_parts import GlobalLength, digits_loader

    proven = Job(even=64, mistaken=True)
    jobs = {
        "stream": Job(train=[8, 8], trainer={"max_duration": "16ba"}),
        "wrong": Job(train=[8, 8], reported=[16, 16]),
        "proven": proven,
        "resumed": proven,
        "evaluation": proven,
    }
    train, evaluation = (r"(?:epoch=\d+\]\[)?", "Eval ") if console else ("train[^|]*", "eval[^|]*")
    of = r"\[%sbatch=(\d+)/(\d+)" if console else r"%s\|[^|]*\| (\d+)/(\d+)"

    def draws(name: str, options: Options) -> list[Drawn]:
        job, more = replace(jobs[name], options=options), {}
        if name == "resumed":
            folder = "of nothing" if options is None else "of countoff"
            first = job.make_trainer(max_duration="3ba", save_folder=folder, save_filename="{batch}.pt")
            first.fit()
            first.close()
            more = {"load_path": f"{folder}/3.pt"}
        if name == "evaluation":
            more = {"eval_dataloader": digits_loader(24, GlobalLength)}
        lines = io.StringIO()
        with open(f"bar{own_rank()}.txt", "w+") as bar:
            loggers = [] if console else [ProgressBarLogger(stream=bar)]
            own = {"log_to_console": console, "console_stream": lines, "console_log_interval": "1ba"}
            trainer = job.make_trainer(loggers=loggers, **own, **more)
            trainer.fit()
            trainer.close()
            bar.seek(0)
            return numbers(of % (evaluation if name == "evaluation" else train), lines.getvalue() + bar.read())

    return {name: partial(draws, name) for name in jobs}


def tqdm() -> dict[str, Draws]:
    """Those of tqdm in an own loop."""
    import torch.distributed as dist
    from tqdm import tqdm

    from countoff.torch import Countoff
    from integration_tests.composer_parts import GlobalLength, digits_loader

    loaders = {
        "stream": lambda: share_loader(8),
        "wrong": lambda: share_loader(8, 16),
        "proven": lambda: digits_loader(64, GlobalLength),
        "evaluation": lambda: share_loader(8),
    }

    def draws(name: str, options: Options) -> list[Drawn]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        countoff, loader, evals = None if options is None else Countoff(**options), loaders[name](), share_loader(3)
        drawn = {"train": io.StringIO(), "eval": io.StringIO()}
        for _ in range(2):
            for kind, each in ("train", loader), ("eval", evals):
                passed = each if countoff is None else getattr(countoff, kind)(each)
                for _ in tqdm(passed, file=drawn[kind], mininterval=0):
                    pass
        return numbers(r"(\d+)(?:/(\d+)|it) \[", drawn["eval" if name == "evaluation" else "train"].getvalue())

    return {name: partial(draws, name) for name in loaders}


BARS: dict[str, Callable[[], dict[str, Draws]]] = {
    "Lightning, tqdm": partial(lightning, "tqdm"),
    "Lightning, rich": partial(lightning, "rich"),
    "Composer's bar": partial(composer, console=False),
    "Composer's console": partial(composer, console=True),
    "the Trainer's bar": transformers,
    "tqdm around `countoff.train`": tqdm,
}


def numbers(pattern: str, text: str) -> list[Drawn]:
    """Returns the numbers that a pattern finds in what was drawn."""
    return [(int(done), int(total) if total else None) for done, total in re.findall(pattern, text)]


def captured(bar: str) -> dict[str, tuple[list[Drawn], list[Drawn]]]:
    """Returns what a bar draws in each situation, without countoff and with it."""
    quiet()
    return {name: (draws(None), draws({})) for name, draws in BARS[bar]().items()}
