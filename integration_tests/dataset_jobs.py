"""Jobs whose ranks hold other datasets than their samplers take them to hold, or the same, in real frameworks.

The last rank holds what is different. Unless a case says so, all ranks have as many batches as the others, so that the
training goes on to its end.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from integration_tests import devices
from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.lightning_jobs import quiet

ROWS, FEWER = 32, 29
EVALS = 16


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def odd() -> bool:
    """Whether this is the rank whose data differs."""
    return own_rank() == world_size() - 1


def rows(count: int, first: int = 0) -> TensorDataset:
    images, labels = digits()
    return TensorDataset(images[first : first + count], labels[first : first + count])


class Own(Dataset[Any]):
    """A dataset of the user's own class."""

    def __init__(self, count: int) -> None:
        self._rows = rows(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


def hub(count: int, *more: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    images, labels = digits()
    columns = {"images": images[:count].tolist(), "labels": labels[:count].tolist()}
    columns |= {name: [0] * count for name in more}
    return datasets.Dataset.from_dict(columns).with_format("torch")


_split: dict[str, Any] = {}


def of_one(parts: Callable[[], tuple[Any, ...]]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Makes both parts of one split; the train dataset is made first."""

    def train() -> Any:
        _split["train"], _split["evaluation"] = parts()
        return _split["train"]

    return train, lambda: _split["evaluation"]


def random_parts(make: Callable[[int], Any], seed: Callable[[], int]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Makes the parts of a random split, with a seed that may be each rank's own."""
    return of_one(lambda: tuple(random_split(make(ROWS + EVALS), [ROWS, EVALS], torch.Generator().manual_seed(seed()))))


def hub_parts(seed: Callable[[], int]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same of a `Dataset` of `datasets`, of which each part then loses a column, as in the Trainer."""

    def parts() -> tuple[Any, Any]:
        found = hub(ROWS + EVALS, "note").train_test_split(test_size=EVALS, seed=seed())
        return found["train"].remove_columns("note"), found["test"].remove_columns("note")

    return of_one(parts)


def parts_of_parts(seed: Callable[[], int]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same, after some rows were set aside for a test."""

    def parts() -> tuple[Any, Any]:
        rest, _ = random_split(Own(ROWS + 2 * EVALS), [ROWS + EVALS, EVALS], torch.Generator().manual_seed(3))
        train, evaluation = random_split(rest, [ROWS, EVALS], torch.Generator().manual_seed(seed()))
        return train, evaluation

    return of_one(parts)


def parts_of_train() -> tuple[Any, Any]:
    """All rows, and a part of them that is each rank's own, as where a model is to overfit."""
    whole = Own(ROWS)
    return Subset(whole, range(ROWS)), Subset(whole, range(own_rank(), 12 + own_rank()))


def different(one: Callable[[], Any], other: Callable[[], Any]) -> Callable[[], Any]:
    """Makes one thing on the last rank, and another one everywhere else."""
    return lambda: one() if odd() else other()


@dataclass(frozen=True)
class Case:
    """One way to give data to a framework.

    Attributes:
        train: Makes the train dataset.
        evaluation: Makes the evaluation dataset; None: there is none.
        samplers: Whether samplers deal the datasets out, where the loop itself decides that.
        options: Options of countoff.
        mappings: Whether its rows are mappings.
        kind: The kind of what is printed.
        says: What is printed, with the odd rank's value, the others' and their ranks to be filled in; empty: nothing.
    """

    train: Callable[[], Any] = lambda: rows(ROWS)
    evaluation: Callable[[], Any] | None = None
    samplers: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    mappings: bool = False
    kind: str = "PlanMismatch"
    says: str = ""

    def wait_for_leak(self, guard: Any) -> None:
        """Waits until the first rank has received a `SplitLeak`, where one is due, at most 20 s."""
        deadline = time.monotonic() + 20
        while self.kind == "SplitLeak" and own_rank() == 0 and time.monotonic() < deadline:
            if any(each.kind == "SplitLeak" for each in guard.notices):
                return
            time.sleep(0.01)

    def expected(self, ranks: int) -> str:
        """The line that rank 0 prints; empty: none."""
        last, others = f"rank {ranks - 1}", "rank 0" if ranks == 2 else f"ranks 0–{ranks - 2}"
        return (
            f"countoff: {self.kind}: {self.says.replace('{odd}', last).replace('{others}', others)}"
            if self.says
            else ""
        )


def counts(fewer: int, more: int, ranks: int) -> str:
    """The rows on the ranks, the fewest ranks first."""
    found = [f"{fewer} rows on {{odd}}", f"{more} rows on {{others}}"]
    return ", ".join(found if ranks > 2 else reversed(found))


LEAK: Any = {
    "kind": "SplitLeak",
    "says": "{rows} validate on rank 0 and train on rank 1: the ranks have split the data in different ways.",
}


def wrong(ranks: int) -> dict[str, Case]:
    """Cases in which something is to be said, for a number of ranks."""
    train = f"before the first batch, the train dataset has {counts(FEWER, ROWS, ranks)}."
    return {
        "fewer rows": Case(different(lambda: rows(FEWER), lambda: rows(ROWS)), says=train),
        "fewer rows of the user's own class": Case(different(lambda: Own(FEWER), lambda: Own(ROWS)), says=train),
        "a part of fewer rows": Case(
            different(lambda: Subset(Own(ROWS), range(FEWER)), lambda: Subset(Own(ROWS), range(ROWS))), says=train
        ),
        "one file of several is missing": Case(
            different(lambda: ConcatDataset([Own(16), Own(13)]), lambda: ConcatDataset([Own(16), Own(16)])), says=train
        ),
        "a random split with a seed of each rank": Case(*random_parts(Own, own_rank), **LEAK),
        "a split of rows of datasets with a seed of each rank": Case(*hub_parts(own_rank), mappings=True, **LEAK),
        "a split of a split with a seed of each rank": Case(*parts_of_parts(own_rank), **LEAK),
    }


RIGHT: dict[str, Case] = {
    "a random split with one seed": Case(*random_parts(Own, lambda: 7)),
    "a split of rows of datasets with one seed": Case(*hub_parts(lambda: 7), mappings=True),
    "a split of a split with one seed": Case(*parts_of_parts(lambda: 7)),
    "other rows of the train data are evaluated on each rank": Case(*of_one(parts_of_train)),
    "the same": Case(evaluation=lambda: rows(EVALS)),
    "the same of the user's own class": Case(lambda: Own(ROWS), lambda: Own(EVALS)),
    "the same rows of datasets": Case(lambda: hub(ROWS), lambda: hub(EVALS), mappings=True),
    "declared": Case(different(lambda: rows(FEWER), lambda: rows(ROWS)), options={"compare_data": False}),
    "switched off": Case(
        different(lambda: rows(FEWER), lambda: rows(ROWS)),
        options={"levels": {"PlanMismatch": "off", "StreamsDiffer": "off"}},
    ),
}
SHARES: dict[str, Case] = {
    "each rank has data of its own": Case(
        lambda: rows(FEWER if odd() else ROWS, 200 * own_rank()),
        lambda: rows(EVALS - 2 * odd(), 200 * own_rank() + 100),
        samplers=False,
    ),
}


def pair(batch: Any) -> tuple[Any, Any]:
    """The images and labels of a batch."""
    return (batch["images"], batch["labels"]) if isinstance(batch, dict) else (batch[0], batch[1])


def loss_of(model: Any, batch: Any) -> Any:
    images, labels = pair(batch)
    return torch.nn.functional.cross_entropy(model(images), labels)


def loader_of(dataset: Any, *, sampler: bool) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset) if sampler else None)


def made(case: Case, *, sampler: bool) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    train = loader_of(case.train(), sampler=sampler)
    return train, None if case.evaluation is None else loader_of(case.evaluation(), sampler=sampler)


def in_torch(cases: list[Case]) -> None:
    from countoff.torch import Countoff

    devices.join()
    for case in cases:
        model = devices.ddp(torch.nn.Linear(64, 10))
        train, evaluation = made(case, sampler=case.samplers)
        with Countoff(uneven_eval="allow", **case.options) as countoff:
            for batch in countoff.train(train):
                loss_of(model, batch).backward()
            for batch in () if evaluation is None else countoff.eval(evaluation):
                loss_of(model.module, batch)
            case.wait_for_leak(countoff.guard)
        dist.barrier()


def in_accelerate(cases: list[Case]) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from countoff.accelerate import Countoff

    for case in cases:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(7)
        train, evaluation = made(case, sampler=False)
        model, train = accelerator.prepare(torch.nn.Linear(64, 10), train)
        evaluation = None if evaluation is None else accelerator.prepare(evaluation)
        with Countoff(accelerator, **case.options) as countoff:
            for batch in countoff.train(train):
                accelerator.backward(loss_of(model, batch))
            for batch in () if evaluation is None else countoff.eval(evaluation):
                loss_of(getattr(model, "module", model), batch)
            case.wait_for_leak(countoff.guard)
        dist.barrier()


def in_lightning(cases: list[Case]) -> None:
    import lightning.pytorch as pl

    from countoff.lightning import Countoff

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def training_step(self, batch: Any, number: int) -> Any:
            return loss_of(self.layer, batch)

        def validation_step(self, batch: Any, number: int) -> Any:
            return loss_of(self.layer, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet()
    for case in cases:
        train, evaluation = made(case, sampler=False)
        off: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            **devices.lightning(),
            strategy="ddp",
            max_epochs=1,
            callbacks=[Countoff(**case.options)],
            enable_model_summary=False,
            **off,
        )
        trainer.fit(Model(), train, evaluation)


def in_transformers(cases: list[Case]) -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from countoff.transformers import Countoff

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, images: torch.Tensor, labels: torch.Tensor, **more: Any) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(images), labels)}

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        images, labels = zip(*map(pair, samples), strict=True)
        return {"images": torch.stack(images), "labels": torch.stack(labels)}

    class Waits(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
            if state.epoch:
                case.wait_for_leak(countoff.guard)

    for case in cases:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        late = case.kind == "SplitLeak" or case.says == ""  # whose evaluations tell more
        evaluation = None if case.evaluation is None or not late else case.evaluation
        arguments = TrainingArguments(
            output_dir="out",
            use_cpu=devices.framework_uses_cpu(),
            report_to="none",
            per_device_train_batch_size=BATCH_SIZE,
            num_train_epochs=1 if evaluation is None else 2,
            eval_strategy="no" if evaluation is None else "epoch",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        countoff, data = Countoff(**case.options), case.train()
        more: dict[str, Any] = {} if evaluation is None else {"eval_dataset": evaluation()}
        Trainer(Model(), arguments, collate, train_dataset=data, callbacks=[countoff, Waits()], **more).train()


def in_fabric(cases: list[Case]) -> None:
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff

    quiet()
    for case in cases:
        fabric = Fabric(**devices.lightning(), strategy="ddp")
        fabric.launch()
        train, evaluation = made(case, sampler=False)
        bare = torch.nn.Linear(64, 10)
        model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
        loader: Any = fabric.setup_dataloaders(train)
        evaluated: Any = None if evaluation is None else fabric.setup_dataloaders(evaluation)
        with Countoff(fabric, optimizer=optimizer, **case.options) as countoff:
            for epoch in range(2):
                if epoch:
                    case.wait_for_leak(countoff.guard)
                for batch in countoff.train(loader):
                    fabric.backward(loss_of(model, batch))
                    optimizer.step()
                with torch.no_grad():
                    for batch in () if evaluated is None else countoff.eval(evaluated):
                        loss_of(bare, batch)


def in_composer(cases: list[Case]) -> None:
    from composer import Trainer
    from composer.utils import dist as composer_dist

    from countoff.composer import Countoff
    from integration_tests.composer_parts import Classifier, start

    def loader(dataset: Any) -> DataLoader[Any]:
        return DataLoader(dataset, BATCH_SIZE, sampler=composer_dist.get_sampler(dataset, shuffle=True))

    start()
    for case in cases:
        model = Classifier()
        with_evaluation = case.evaluation is not None
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=loader(case.train()),
            eval_dataloader=loader(case.evaluation()) if with_evaluation and case.evaluation else None,
            device=devices.accelerator(),
            precision="fp32",
            max_duration="1ep",
            progress_bar=False,
            callbacks=[Countoff(**case.options)],
        )
        trainer.fit()
        trainer.close()


def fit_uneven() -> None:
    """Fits in Lightning with datasets by which ranks have different numbers of batches."""
    in_lightning([Case(lambda: rows(24 if odd() else ROWS))])


FRAMEWORKS: dict[str, tuple[Callable[[list[Case]], None], bool]] = {
    "torch": (in_torch, False),
    "accelerate": (in_accelerate, False),
    "lightning": (in_lightning, True),
    "transformers": (in_transformers, False),
    "fabric": (in_fabric, False),
    "composer": (in_composer, True),
}
"""By framework: what trains with the cases, and whether an evaluation is known when the fit begins."""


def cases_of(framework: str, ranks: int) -> Iterator[Case]:
    """The cases of a framework, the wrong ones first."""
    for case in (wrong(ranks) | RIGHT).values():
        if not (framework == "composer" and case.mappings):
            yield case
    if framework == "torch":
        yield from SHARES.values()


def train(framework: str) -> None:
    """Trains with each case of a framework."""
    FRAMEWORKS[framework][0](list(cases_of(framework, world_size())))
