"""Programs of other projects, unchanged, by their users' launchers: ``python -m integration_tests.shipped``.

Each program runs on two CPU ranks without countoff, and with it in front of the script or in front of the launcher. A
healthy one must end alike: with exit code 0 and the same weights or printed losses, and countoff must print nothing.
Then one rank gets a batch less, by what the command line gives that rank. It must be named, and the job must end.

The data are scikit-learn's digits and texts that are written here, and nothing is downloaded. These programs need no
GPU, and each has a Trainer: a loop of its own is counted only with countoff's lines in it. Of plain PyTorch none was
found: the train.py of timm and nanoGPT, torchvision's references, and PyTorch's own examples with several ranks, need
one GPU for each. `accelerate launch` starts several CPU ranks only through MPI. transformers' loops without a Trainer
for causal, masked and infilled texts ask for DistributedType.TPU, which Accelerate has no more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration_tests.torchrun import TorchrunTimedOut, launched

DEADLINE_SECONDS = 240
RANKS = 2
COUNTED = ("-m", "countoff.run")
LIGHTNING = "examples/pytorch/basics/backbone_image_classifier.py"
MODELING = "examples/pytorch/language-modeling/run_clm.py"
_TRAINED_BY_TRL = (
    "-m trl.scripts.sft --model_name_or_path model --use_cpu --bf16 false --num_train_epochs 2 --report_to none "
    "--per_device_train_batch_size 4 --max_length 32 --logging_steps 2 --output_dir out --dataset_name data-{rank}"
)
_TRAINED_BY_LIGHTNING = (
    f"{LIGHTNING} --trainer.max_epochs 2 --trainer.accelerator cpu --trainer.devices 2 --data.batch_size 256 "
    "--trainer.limit_val_batches 2 --trainer.enable_progress_bar false --trainer.limit_train_batches {batches}"
)
_TRAINED_BY_TRANSFORMERS = (
    f"{MODELING} --model_name_or_path model --use_cpu --do_train --num_train_epochs 2 --report_to none "
    "--per_device_train_batch_size 100 --block_size 32 --output_dir out --train_file lines-{rank}.txt"
)
EVEN: Mapping[str, object] = {"rank": 0, "batches": 10}
"""What a command line says on all ranks of a healthy job."""
UNEVEN: Mapping[str, object] = {"rank": "$RANK", "batches": "$((10 - RANK))"}
"""What it says, to a shell, where rank 1 gets less: its own data, or fewer batches."""


@dataclass(frozen=True)
class Program:
    """A program as its project ships it.

    Attributes:
        name: Its name in the table.
        arguments: Python's arguments, in the form of a shell, with names of ``EVEN`` in braces.
        launchers: The launchers, by what stands in the table.
        prepare: Writes its data into a directory.
        results: Which files hold what it has learned, as a pattern; empty: the lines that it has printed.
        checkout: The project in whose checkout it stands; empty: it is in an installed package.
    """

    name: str
    arguments: str
    launchers: tuple[str, ...]
    prepare: Callable[[Path], None]
    results: str = ""
    checkout: str = ""


def _write_texts(directory: Path) -> None:
    """A tokenizer of letters, a model of one layer, and texts for each rank, in several forms; rank 1 has fewer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {each: place for place, each in enumerate([*"abcdefghijklmnopqrstuvwxyz 0123456789.", "<e>", "<u>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", unk_token="<u>", pad_token="<e>"
    ).save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=vocabulary["<e>"],
        pad_token_id=vocabulary["<e>"],
        bos_token_id=vocabulary["<e>"],
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    for rank in range(RANKS):
        texts = [{"text": f"text {number} of the shard."} for number in range(64 - 8 * rank)]
        (directory / f"data-{rank}").mkdir()
        (directory / f"data-{rank}" / "train.jsonl").write_text("\n".join(map(json.dumps, texts)))
        _write_lines(directory / f"lines-{rank}.txt", 768 - 256 * rank)


def _write_lines(path: Path, count: int) -> None:
    path.write_text("".join(f"line {number} of the shard.\n" for number in range(count)))


def _write_digits(directory: Path, *, train: int) -> None:
    """The digits as files of MNIST, with so many train images; again and again the same ones."""
    import numpy
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    large = numpy.zeros((len(images), 28, 28), numpy.uint8)
    large[:, 2:26, 2:26] = numpy.kron(images.reshape(-1, 8, 8) * 15, numpy.ones((3, 3)))
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", 256)):
        chosen = numpy.arange(count) % len(images)
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + large[chosen].tobytes())
        head = struct.pack(">II", 0x801, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels[chosen].astype(numpy.uint8).tobytes())


def _write_for_lightning(directory: Path) -> None:
    """What its example reads: as many digits as MNIST has, because it splits them by numbers."""
    _write_digits(directory / "examples" / "Datasets", train=60000)
    (directory / "data").symlink_to("examples/Datasets")


PROGRAMS = (
    Program(
        "TRL, trl.scripts.sft",
        _TRAINED_BY_TRL,
        ("torchrun", "composer"),
        _write_texts,
        "out/model.safetensors",
    ),
    Program(
        "Lightning, backbone_image_classifier.py",
        _TRAINED_BY_LIGHTNING,
        ("torchrun", "python"),
        _write_for_lightning,
        checkout="lightning",
    ),
    Program(
        "transformers, run_clm.py",
        _TRAINED_BY_TRANSFORMERS,
        ("torchrun",),
        _write_texts,
        "out/model.safetensors",
        checkout="transformers",
    ),
)
PROJECTS = tuple(dict.fromkeys(each.checkout for each in PROGRAMS if each.checkout))
ALONE = ("python",)
"""Launchers that start all ranks with one command line, so that no rank can be given another one."""


def command(program: Program, launcher: str, where: str, *, uneven: bool) -> list[str]:
    """The command line of a job.

    Args:
        program: The program.
        launcher: How its ranks are started.
        where: Where countoff stands: ``"script"``, ``"launcher"``, or empty for a job without it.
        uneven: Whether rank 1 gets a batch less.
    """
    tools = Path(sys.executable).parent
    counted = COUNTED if where == "script" else ()
    in_front = (str(tools / "countoff"), "run", "--") if where == "launcher" else ()
    arguments = program.arguments.format_map(UNEVEN if uneven else EVEN)
    python = (*counted, *shlex.split(arguments))
    shell = ("bash", "-c", f"exec {shlex.quote(sys.executable)} {' '.join(counted)} {arguments}")
    if launcher == "python":
        return [*in_front, sys.executable, *python]
    if launcher == "torchrun":
        start = [str(tools / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}"]
        return [*in_front, *start, *(("--no-python", *shell) if uneven else python)]
    start = [str(tools / "composer"), f"--nproc={RANKS}"]
    return [*in_front, *start, *(("--command_mode", *shell) if uneven else python)]


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, its output, and a digest of what it has learned, empty if that is nothing."""

    exit_code: int
    output: str
    result: str

    @property
    def said(self) -> list[str]:
        """The lines that countoff has printed."""
        return [line for line in self.output.splitlines() if "countoff:" in line]


def run(program: Program, template: Path, line: Sequence[str]) -> Ended:
    """Runs a job in a fresh copy of its directory, and ends it at a deadline."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "job"
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(place) / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        shutil.copytree(template, directory, symlinks=True)
        with launched(line, directory=directory, env=offline) as job:
            try:
                exit_code = job.finish(time.monotonic() + DEADLINE_SECONDS).exit_code
            except TorchrunTimedOut:
                exit_code = -signal.SIGKILL
            output = job.output()
        learned = _printed(output).encode()
        if program.results:  # each rank may save them, into a directory of its own
            learned = b"".join(sorted({path.read_bytes() for path in directory.glob(program.results)}))
        return Ended(exit_code, output, hashlib.sha256(learned).hexdigest() if learned else "")


def _printed(output: str) -> str:
    """The losses and predictions that all ranks have printed, sorted: two ranks may print into one another's lines.

    Numbers behind a colon are times of day.
    """
    return "\n".join(sorted(re.findall(r"(?<![:\d])\d+\.\d{4,}", output)))


@dataclass(frozen=True)
class Row:
    """How the jobs of one program, one launcher and one place of countoff ended.

    Attributes:
        program: The program.
        launcher: How its ranks were started.
        where: Where countoff stood, as in ``command``.
        silent: Whether the healthy job ended as it does without countoff, and countoff printed nothing.
        told: What was said of the rank that has a batch less; None if there was no such job, empty if it was not named.
        seconds: How long it took.
    """

    program: Program
    launcher: str
    where: str
    silent: bool
    told: str | None
    seconds: float

    def markdown(self) -> str:
        """The line of the table."""
        healthy = "silent, the same result" if self.silent else "WRONG"
        told = "(one command line for all ranks)" if self.told is None else self.told or "WRONG"
        cells = (self.program.name, self.launcher, self.where, healthy, told, f"{self.seconds:.0f} s")
        return f"| {' | '.join(cells)} |"


def rows(programs: Sequence[Program], checkouts: Mapping[str, Path], wrong: list[str]) -> Iterator[Row]:
    """Runs programs, and yields a row of the table for each of them, each launcher, and each place of countoff.

    Args:
        programs: The programs.
        checkouts: The checkouts in which some of them stand, by project.
        wrong: Where what went wrong is added.
    """
    for program in programs:
        with tempfile.TemporaryDirectory() as place:
            template = Path(place) / "template"
            template.mkdir()
            if program.checkout:
                shutil.copytree(checkouts[program.checkout] / "examples", template / "examples")
            program.prepare(template)
            for launcher in program.launchers:
                without = run(program, template, command(program, launcher, "", uneven=False))
                if without.exit_code or not without.result:
                    wrong.append(f"{program.name}, {launcher}, without countoff:\n{without.output}")
                    continue
                for where in ("script", "launcher"):
                    yield _row(program, template, launcher, where, without, wrong)


def _row(program: Program, template: Path, launcher: str, where: str, without: Ended, wrong: list[str]) -> Row:
    began = time.monotonic()
    healthy = run(program, template, command(program, launcher, where, uneven=False))
    silent = (healthy.exit_code, healthy.result) == (0, without.result) and not healthy.said
    if not silent:
        wrong.append(f"{program.name}, {launcher}, {where}, healthy:\n{healthy.output}")
    told = None
    if launcher not in ALONE:
        uneven = run(program, template, command(program, launcher, where, uneven=True))
        named = [line.partition("countoff: ")[2].removesuffix(" See the output of rank 0.") for line in uneven.said]
        named = [line for line in dict.fromkeys(named) if "rank 1" in line]
        ended = named and uneven.exit_code
        told = f"{' Then: '.join(named)} Exit code {uneven.exit_code}." if ended else ""
        if not ended:
            wrong.append(f"{program.name}, {launcher}, {where}, uneven:\n{uneven.output}")
    return Row(program, launcher, where, silent, told, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a healthy job was not left alone, or an uneven one not named."""
    parser = argparse.ArgumentParser(
        "python -m integration_tests.shipped", description=(__doc__ or "").splitlines()[0].partition(":")[0] + "."
    )
    for project in PROJECTS:
        parser.add_argument(f"--{project}", type=Path, metavar="CHECKOUT", dest=project, help="for its examples")
    parser.add_argument("--only", metavar="WORD", default="", help="those with this word in their name")
    given = vars(parser.parse_args(arguments))
    checkouts: dict[str, Path] = {project: given[project] for project in PROJECTS if given[project] is not None}
    for project, checkout in checkouts.items():
        if not (checkout / "examples").is_dir():
            parser.error(f"{checkout} has no examples of {project}")
    chosen = [each for each in PROGRAMS if given["only"] in each.name]
    programs = [each for each in chosen if not each.checkout or each.checkout in checkouts]
    for each in chosen:
        if each not in programs:
            print(f"left out without --{each.checkout}: {each.name}", file=sys.stderr)
    wrong: list[str] = []
    print("| program | launcher | countoff in front of | healthy | rank 1 has a batch less | time |")
    print("|---|---|---|---|---|---|")
    for row in rows(programs, checkouts, wrong):
        print(row.markdown(), flush=True)
    print(*wrong, sep="\n\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
