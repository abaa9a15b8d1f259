"""Seeded runs that stop at a random batch and resume, twice, on as many ranks or on 2, 3 and 4; half of them wrongly.

    python -m integration_tests.once_resumes
    python -m integration_tests.once_resumes --runs 20 --first 100

A right one must hear nothing. A wrong one must be named, in the run that is wrong, with the numbers of what its ranks
have read; where the documentation promises nothing, it may be. It prints a table as markdown, by kinds of loaders and
of faults. The exit code is 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import countoff.accelerate
import countoff.torch
from integration_tests.digits import own_rank
from integration_tests.harness import RankResult, ask_no_name_server, run_ranks
from integration_tests.once_jobs import counted_trainer, forked

BATCH, EPOCHS = 4, 4
KINDS = ("torch", "accelerate", "stateful", "lightning")
FAULTS: Mapping[str, tuple[str, ...]] = {
    "torch": ("no set_epoch", "another seed", "skips too few", "ranks apart"),
    "accelerate": ("no set_epoch", "another seed", "skips too few", "ranks apart", "random order"),
    "stateful": ("no set_epoch", "another seed", "skips too few", "ranks apart"),
    "lightning": ("ranks apart",),
}
UNPROVEN_ON_MORE = {("torch", "skips too few"), ("accelerate", "random order")}
"""What nothing proves where the number of ranks has changed."""
NUMBERS = re.compile(
    r"in (?:the part of )?train epoch (?P<epoch>\d+)(?: that this run has read)?, "
    r"(?:(?P<unread>\d+) of (?P<rows>\d+) samples? (?:was|were) read by no rank .*, and (?P<twice>\d+) more than once"
    r"|(?P<only_twice>\d+) of (?P<of>\d+) samples? (?:was|were) read more than once).*"
)


@dataclass(frozen=True)
class Case:
    """A run that stops in train epoch 1 and, resumed, in epoch 2.

    Attributes:
        seed: From which all the rest follows, and by which its data is shuffled.
        kind: One of `KINDS`.
        fault: One of the kind's `FAULTS`; empty if it resumes rightly.
        wrong: The stage, 1 or 2, that resumes wrongly.
        ranks: Ranks of each of the three stages.
        rows: Rows of the dataset.
        stops: Batches of a rank after which the first two stages stop.
        workers: Workers of each loader.
        drop_last: Whether the sampler leaves out what it cannot share out evenly; else it repeats some.
    """

    seed: int
    kind: str
    fault: str
    wrong: int
    ranks: tuple[int, int, int]
    rows: int
    stops: tuple[int, int]
    workers: int
    drop_last: bool

    @classmethod
    def of(cls, seed: int) -> Case:
        """The case of a seed."""
        chosen = random.Random(seed)
        kind = chosen.choices(KINDS, (4, 4, 2, 1))[0]
        fault = chosen.choice(FAULTS[kind]) if seed % 2 else ""
        grows = kind in ("torch", "accelerate") and chosen.random() < 0.5
        ranks, rows = (2, 3, 4) if grows else (2, 2, 2), chosen.randrange(90, 170)
        least = [rows // BATCH // count - 1 for count in ranks]  # batches that a rank has in any case, but the last
        stops = [
            chosen.randrange(first, least[place], step)
            for place, (first, step) in enumerate(((3, 3), (4, 4)) if grows else ((3, 1), (3, 1)))
        ]
        wrong = 1 if fault == "random order" else chosen.choice((1, 2))  # its loader is so from the beginning
        workers, drop_last = chosen.choice((0, 0, 2)), chosen.random() < 0.4
        return cls(seed, kind, fault, wrong, ranks, rows, (stops[0], stops[1]), workers, drop_last)

    def is_wrong(self, stage: int) -> bool:
        """Whether this stage resumes wrongly. The later ones are left out."""
        return bool(self.fault) and stage == self.wrong

    def fault_at(self, stage: int) -> str:
        return self.fault if self.is_wrong(stage) else ""

    def skipped(self, stage: int) -> int:
        """Batches of the open epoch that a rank of this stage does not read or train on again."""
        if stage == 0:
            return 0
        done = self.stops[stage - 1] * self.ranks[stage - 1] // self.ranks[stage]
        return max(1, done - 2) if self.fault_at(stage) == "skips too few" else done

    @property
    def is_promised(self) -> bool:
        """Whether the fault is one that is found by all means."""
        return self.ranks[2] == 2 or (self.kind, self.fault) not in UNPROVEN_ON_MORE


class Loop:
    """What is common to the loops of one stage of a case.

    Args:
        case: The case.
        stage: The stage, from 0.
        folder: Where checkpoints are.
    """

    def __init__(self, case: Case, stage: int, folder: Path) -> None:
        self.case, self.stage = case, stage
        self.fault = case.fault_at(stage)
        self.read: dict[int, list[int]] = {}
        self.path = folder / f"{case.seed}-{own_rank() if case.kind == 'stateful' else 0}-{stage}.pt"
        self.before = Path(str(self.path).replace(f"-{stage}.pt", f"-{stage - 1}.pt"))
        self.apart = self.fault == "ranks apart" and own_rank() == dist.get_world_size() - 1
        self.seed = case.seed + (1000 if self.fault == "another seed" else 0)
        generator = torch.Generator().manual_seed(case.seed)
        self.dataset = TensorDataset(torch.arange(case.rows), torch.randn(case.rows, 16, generator=generator))
        torch.manual_seed(self.seed)
        self.model: Any = torch.nn.Linear(16, 2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def epoch_for(self, epoch: int) -> int | None:
        """The epoch that the loop gives its sampler; None: none."""
        if self.fault == "no set_epoch":
            return None
        return epoch + 7 if self.apart and epoch == self.stage else epoch

    def place(self, epoch: int) -> int:
        """Batches that are skipped in an epoch."""
        return self.case.skipped(self.stage) if self.stage and epoch == self.stage else 0

    def take(self, epoch: int, number: int, batch: Any) -> bool:
        """Trains on a batch; whether the stage stops there."""
        if number > self.place(epoch):
            self.model(batch[1]).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.stage < 2 and (epoch, number) == (self.stage + 1, self.case.stops[self.stage])

    def note(self, epoch: int, batch: Any) -> None:
        self.read.setdefault(epoch, []).extend(batch[0].tolist())

    def outcome(self, guard: Any) -> tuple[list[str], dict[int, list[int]]]:
        return [f"{notice.kind}: {notice.sentence}" for notice in guard.notices], self.read


def _torch(loop: Loop) -> Any:
    case = loop.case
    sampler = DistributedSampler(loop.dataset, seed=loop.seed, drop_last=case.drop_last)
    kind = StatefulDataLoader if case.kind == "stateful" else DataLoader
    loader: Any = kind(loop.dataset, BATCH, sampler=sampler, **forked(case.workers))
    counted = countoff.torch.Countoff(optimizer=loop.optimizer)
    if loop.stage:
        state = torch.load(loop.before)
        counted.load_state_dict(state["countoff"])
        if state["loader"] is not None and loop.fault != "skips too few":
            loader.load_state_dict(state["loader"])
    for epoch in range(loop.stage, EPOCHS):
        if (given := loop.epoch_for(epoch)) is not None:
            sampler.set_epoch(given)
        begun = loop.place(epoch) if case.kind == "stateful" and loop.fault != "skips too few" else 0
        for number, batch in enumerate(counted.train(loader, epoch=epoch), begun + 1):
            loop.note(epoch, batch)
            if loop.take(epoch, number, batch):
                position = loader.state_dict() if case.kind == "stateful" else None
                if case.kind == "stateful" or own_rank() == 0:
                    torch.save({"countoff": counted.state_dict(), "loader": position}, loop.path)
                break
        else:
            continue
        break
    counted.close()
    return counted.guard


def _accelerate(loop: Loop) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    case, folder = loop.case, loop.path.with_suffix("")
    config = DataLoaderConfiguration(use_seedable_sampler=case.fault != "random order", even_batches=not case.drop_last)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(loop.seed + (5 if loop.apart else 0))
    loader: Any = DataLoader(loop.dataset, BATCH, shuffle=True, drop_last=case.drop_last, **forked(case.workers))
    loop.model, loop.optimizer, loader = accelerator.prepare(loop.model, loop.optimizer, loader)
    counted = countoff.accelerate.Countoff(accelerator)
    if loop.stage:
        accelerator.load_state(str(loop.before.with_suffix("")))
    for epoch in range(loop.stage, EPOCHS):
        skips = loop.place(epoch)
        active: Any = accelerator.skip_first_batches(loader, skips) if skips else loader
        if (given := loop.epoch_for(epoch)) is not None:
            active.set_epoch(given)
        for number, batch in enumerate(counted.train(active, epoch=epoch), skips + 1):
            loop.note(epoch, batch)
            if loop.take(epoch, number, batch):
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
                break
        else:
            continue
        break
    counted.close()
    accelerator.free_memory()
    return counted.guard


def _lightning(loop: Loop) -> Any:
    """Stops at the end of an epoch: Lightning reads an epoch from its first batch again."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 2)
            self.sampler: Any = None

        def training_step(self, batch: Any, index: int) -> Any:
            loop.note(self.current_epoch, batch)
            return self.layer(batch[1]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_epoch_start(self) -> None:
            if (given := loop.epoch_for(self.current_epoch)) is not None:
                self.sampler.set_epoch(given)

        def train_dataloader(self) -> Any:
            self.sampler = DistributedSampler(loop.dataset, seed=loop.seed, drop_last=loop.case.drop_last)
            return DataLoader(loop.dataset, BATCH, sampler=self.sampler, **forked(loop.case.workers))

    ranks = dist.get_world_size() if dist.is_initialized() else loop.case.ranks[loop.stage]
    trainer, kept = counted_trainer(ranks, max_epochs=EPOCHS if loop.stage == 2 else loop.stage + 1)
    trainer.fit(Net(), ckpt_path=str(loop.before) if loop.stage else None)
    if loop.stage < 2:
        trainer.save_checkpoint(loop.path)
    return kept[0]


LOOPS = {"torch": _torch, "stateful": _torch, "accelerate": _accelerate, "lightning": _lightning}


def train(cases: Sequence[Case], stage: int, folder: str) -> list[tuple[list[str], dict[int, list[int]]]]:
    """Runs one stage of cases; what was said, and which rows this rank has read in each epoch."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: list[tuple[list[str], dict[int, list[int]]]] = []
    for case in cases:
        loop = Loop(case, stage, Path(folder))
        found.append(loop.outcome(LOOPS[case.kind](loop)))
    return found


def wrong_in(case: Case, stage: int, said: Sequence[str], read: Sequence[dict[int, list[int]]]) -> str:
    """What is not as it should be in a stage; empty if all is well.

    Args:
        case: The case.
        stage: The stage.
        said: What rank 0 has heard.
        read: Which rows each rank has read, by epoch.
    """
    if not case.is_wrong(stage):
        return f"a right one heard: {said}" if said else ""
    if not said:
        rows = Counter(chain(*(each.get(stage, ()) for each in read)))
        by_chance = case.fault == "ranks apart" and max(rows.values()) == 1  # a rest of few batches
        return "a wrong one is not named" if case.is_promised and not by_chance else ""
    for sentence in said:
        if not sentence.startswith("NotReadOnce: ") or "has skipped its first" in sentence:
            continue
        found = NUMBERS.search(sentence)
        if found is None:
            return f"no numbers: {sentence}"
        rows = Counter(chain(*(each.get(int(found["epoch"]), ()) for each in read)))
        due = case.rows - len(rows), sum(times > 1 for times in rows.values())
        told = int(found["unread"] or due[0]), int(found["twice"] or found["only_twice"])
        if told != due:
            return f"{due} were never and twice read: {sentence}"
    return ""


def run(cases: Sequence[Case], folder: Path) -> Iterator[tuple[Case, list[str], str]]:
    """Runs all stages of cases; each with what was said in its last one, and what is wrong about it."""
    going = list(cases)
    for stage in range(3):
        for ranks in sorted({case.ranks[stage] for case in going}):
            batch = [case for case in going if case.ranks[stage] == ranks]
            work = folder / f"{stage}-{ranks}"
            work.mkdir()
            results: list[RankResult] = run_ranks(
                train, ranks, batch, stage, str(folder), directory=work, deadline_seconds=60 + 20 * len(batch)
            )
            for number, case in enumerate(batch):
                said, read = results[0].value[number][0], [each.value[number][1] for each in results]
                wrong = wrong_in(case, stage, said, read)
                if wrong or case.is_wrong(stage) or stage == 2:
                    going.remove(case)
                    yield case, said, wrong and f"stage {stage}: {wrong}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs cases; returns 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(
        "python -m integration_tests.once_resumes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which kinds of loaders")
    given = parser.parse_args(arguments)
    ask_no_name_server()
    cases = [case for case in map(Case.of, range(given.first, given.first + given.runs)) if case.kind in given.kinds]
    with tempfile.TemporaryDirectory() as directory:
        found = list(run(cases, Path(directory)))
    print("| loader | fault | ranks | runs | named | found by | not as it should be |\n|---|---|---|---|---|---|---|")
    rows: dict[tuple[str, str, str], list[tuple[list[str], str]]] = {}
    for case, said, wrong in found:
        grows = "2, 3, 4" if case.ranks[2] == 4 else "2, 2, 2"
        rows.setdefault((case.kind, case.fault or "none", grows), []).append((said, wrong))
    for (kind, fault, ranks), each in sorted(rows.items()):
        by = Counter(sentence.partition(":")[0] for said, _ in each for sentence in said)
        named, bad = sum(bool(said) for said, _ in each), sum(bool(wrong) for _, wrong in each)
        kinds = ", ".join(f"`{name}` {times}" for name, times in sorted(by.items()))
        print(f"| {kind} | {fault} | {ranks} | {len(each)} | {named} | {kinds} | {bad} |")
    bad = [(case, wrong) for case, _, wrong in found if wrong]
    print(f"\n{len(found)} runs, {len(bad)} not as they should be")
    for case, wrong in bad:
        print(f"  {case}: {wrong}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
