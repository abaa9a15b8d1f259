"""The command line. It starts in a tenth of a second, because each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from countoff.core.messages import count_of, nearest

_ABOUT = """\
Names the training rank that is out of step before it hangs, drifts or quietly corrupts the job.

Add it to your job, here one of Lightning's:

    from countoff.lightning import Countoff
    trainer = Trainer(callbacks=[Countoff()])

Or leave the code as it is, and put this in front of the command that starts the job:

    countoff run -- torchrun --nproc-per-node 8 train.py

See it work with real ranks on this machine:

    countoff demo

Before you pay for GPUs, print what a configuration really trains, and what is wrong with it:

    countoff plan train.toml --world-size 8
    countoff check train.toml --world-size 8

Read what a message of countoff means, and what to do:

    countoff explain UnevenBatches

Look at what each rank did over time:

    countoff report runs/today

Watch a job that writes a trace (the setting trace_dir), while it runs:

    countoff top runs/today

What a command does, with examples:

    countoff plan --help

The commands plan, check, report and top need an extra:

    pip install 'countoff[cli]'
"""
_CONFIG = """\
CONFIG is the file with which a training framework is started; or module:function for a Python config of TorchTitan 0.3
and later, which is imported and called. In place of it, the command that starts a training of Megatron-LM or of a
Trainer may follow --. It is read, and not run.
"""
_PLAN = f"""\
Prints how many samples, tokens and steps a run really has on a number of ranks. The numbers come from a configuration,
from flags, or from both; a flag wins over the file.

    countoff plan --batch-size 2 --seq-len 2048 --world-size 4
    countoff plan llama3_8b.toml --world-size 8,64,512
    countoff plan --batch-size 4 --dataset-size 1000 --epochs 3 --world-size 16
    countoff plan my_configs:llama3_8b --nodes 2 --ranks-per-node 8 --explain

A data rank is a rank that reads data of its own; ranks that differ only in tp, cp or pp read the same data.
{_CONFIG}\
Numbers that do not divide are refused, never rounded.
Exit code: 0 if there is a plan, also one with a line such as "stops …" below it, which countoff check counts as a
fault, with exit code 1; or 2 if there is no plan, with one line that gives the reason.
"""
_CHECK = f"""\
Prints what is wrong with configurations on a number of ranks: one line per issue, the worst first.

    countoff check train.toml --world-size 64
    countoff check configs/*.yaml --world-size 64 --github
    countoff check llama.yaml --world-size 16 --ignore dp-rank
    countoff check -- torchrun --nproc_per_node 8 train.py --num_train_epochs 3
    countoff check train.toml --world-size 64 --json

Each line starts with a level and a code:
    silent  the run goes on and is wrong
    stops   the run fails with an error
    note    worth knowing, no fault

{_CONFIG}\
Exit code: 0 without a fault, 1 with a fault, or 2 if a configuration cannot be read, with one line that gives the
reason; the others are checked all the same.
"""
_EXPLAIN = """\
Prints what a name means that countoff has shown: a kind of verdict, with a message, the cause, an example and the fix;
an error; an exit code; or a code of countoff check. Without a name, it lists all names.

    countoff explain UnevenBatches
    countoff explain 87
    countoff explain dp-rank warm-up
    countoff explain --json UnevenBatches
    countoff explain

Exit code: 0, or 2 if there is no such name, with one line that gives the nearest one.
"""
_REPORT = """\
Draws what each rank of a job did over time, from its trace, as one HTML page that needs no network: the verdict, a lane
per rank, who is slow, the counts of all ranks, the learning rate, and where the ranks were at a stall.

    countoff report runs/today
    countoff report host-a/trace host-b/trace -o job.html --open
    countoff report runs/today --text
    countoff report runs/today --json | jq -r .headline
    countoff report runs/today --perfetto job.pftrace

Without -o, the page goes to the current directory and is named after DIR: today.html. A page of an earlier call is
replaced; any other file of this name is kept, and the call refused.

A job writes its trace to the directory that trace_dir="runs/today" or COUNTOFF_TRACE_DIR names. Give several
directories if each host wrote to its own, or for a run and its resume.
The page has no script, so it can be read everywhere; to zoom, open the file that --perfetto writes.
Exit code: 0; 1 if --perfetto needs its extra: pip install 'countoff[perfetto]'; or 2 if there is no trace or the page
cannot be written, with one line that gives the reason.
"""
_TOP = """\
Shows what the ranks of a job are doing while it runs. The job has to write a trace: give it trace_dir="runs/today", or
set COUNTOFF_TRACE_DIR.

    countoff top runs/today
    countoff top node0/trace node1/trace
    countoff top runs/today | head
    countoff top --json runs/today | jq .rows

Each row is a class of ranks that do the same: which ranks, their span, why they are not with the others, its batches,
batches per second, the share of the time that they wait for the loader, how old their last line is, and their host.
Those to look at come first: silent (no line for 15 seconds), behind, without a batch for so long, slow, slow loader.
Below is the last warning. The view ends with the verdict, or when all ranks have ended; Ctrl-C leaves it.
It only reads files, so the job does not notice it, and several people can look at once.
In a pipe, and with --json, it shows this moment, and ends.
Exit code: 0; 1 if the job ended with a verdict or an exception; 2 if a directory cannot be read or there is no trace to
show, with one line that gives the reason; 130 after Ctrl-C.
"""
_RUN = """\
Runs a command that starts a job, with countoff in every Python process below it. The code stays as it is.

    countoff run -- torchrun --nproc-per-node 8 train.py --lr 3e-4
    countoff run --uneven-train stop -- accelerate launch train.py
    countoff run --report -- composer -n 8 train.py
    countoff run --dry-run -- torchrun --nproc-per-node 8 train.py

countoff is added to every Trainer of Lightning, Composer and transformers that the program makes without one. In a loop
of the program's own, only stalls are reported; batches are compared only where the code iterates
countoff.train(loader). The program says so at its end.
A Countoff in the code wins.
With several hosts, put it in front of the launcher on each, or put -m countoff.run in front of the script:

    srun python -m countoff.run train.py

Each option below is the setting of that name; docs/settings.md says what it means. Variables such as
COUNTOFF_UNEVEN_TRAIN work too.
Exit code: that of the command, or 128 and the signal's number if a signal ended it; 2 if an option is bad, 126 or 127
if the command cannot be run, with one line that gives the reason.
"""
_DEMO = """\
Runs a real Lightning job on four ranks, one of which has a batch less: first without countoff, then with it, then with
the data fixed, then with uneven_train="stop". Each is examples/lightning_digits.py, with other settings.

    countoff demo
    countoff demo --trace-dir runs/demo

It trains on scikit-learn's digits, on the CPU, in about a minute on two cores. It leaves nothing but the trace, if you
ask for one: countoff report runs/demo draws it.
"""


_NOTIFY = """\
Sends a test message to the addresses of apprise in COUNTOFF_NOTIFY, which get the verdicts of your jobs.

    export COUNTOFF_NOTIFY="slack://… mailto://…"
    countoff notify

Needs the extra notify: pip install 'countoff[notify]'. https://appriseit.com/services/ lists what an address can be.
Exit code: 0 if all of them have taken it, 1 if one has not, 2 if there is none.
"""
_SETTINGS = (
    ("on-divergence", "EFFECT", "raise or warn, where ranks are proven to be out of step"),
    ("levels", "KIND=LEVEL,…", "raise, warn or off, by kind of verdict: Stalled=raise,SameOrder=off"),
    ("totals", "HOW", "show the true totals; fix: also set the framework's own where they are proven; off"),
    ("uneven-train", "HOW", "raise, or stop each epoch with the shortest rank"),
    ("uneven-eval", "HOW", "warn, raise, allow, off (compare none), or stop each with the shortest rank"),
    ("stall-seconds", "SECONDS", "without progress of any rank, before a stall is reported"),
    ("lost-seconds", "SECONDS", "without any answer of a host, before its ranks are lost"),
    ("deadline-seconds", "SECONDS", "that the start of a fit waits for the other ranks"),
    ("compare-data", "WHETHER", "on, or off: do not compare what the ranks read"),
    ("weights-every", "N", "optimizer steps between two comparisons of the weights; 0: none"),
    ("verdict-file", "FILE", "where the verdict that ends the job is written, for a scheduler"),
    ("trace-dir", "DIR", "where each rank writes what it did, for countoff report and top"),
)
"""The settings as flags of `countoff run`: name, metavar, meaning. Addresses to notify are none: others see flags."""
_WIDEST = 120
"""Longer lines are hard to read."""
_EXTRA = {"rich": "rich", "jinja2": "Jinja2", "yaml": "PyYAML", "tomli": "tomli"}
"""The modules that the extra `cli` brings, and their packages. A plain install brings none: where rich is installed,
Lightning shows another progress bar."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help whose paragraphs are as wide as the terminal; a name such as --world-size is not cut at its dashes.

    In a description, a line that is indented stays as it is, and one that ends a sentence ends its paragraph.
    """

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action.choices, dict):  # argparse forgets that the names of commands are indented once more
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.sub(r"(?<=[^.:\n])\n(?=\S)", " ", text.strip()).splitlines()
        filled = (line if line.startswith(" ") else _wrapped(line, width) for line in paragraphs)
        return "\n".join(f"{indent}{line}" for line in filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(text, width).splitlines()


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, min(width, _WIDEST), break_on_hyphens=False, break_long_words=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        _refuse(f"{message} (see {self.prog} --help)", code=2)


def main(arguments: Sequence[str] | None = None, *, program: str = "countoff") -> None:
    """Runs the command line; the console script `countoff`.

    Args:
        arguments: What follows the program's name; None: as it was called.
        program: How the command line was called, for its usage lines.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]  # "×" in a C locale
    try:
        try:
            _call(given, program)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # `countoff plan … | head`: flushing the rest at the interpreter's exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _call(given: Sequence[str], program: str) -> None:
    parser, commands = _parser(program)
    command = next((one for one in given if not one.startswith("-")), None)
    if command is not None and command not in commands:
        hint = nearest(command, commands) or f"; {program} --help lists all commands"
        _refuse(f"there is no command {command!r}{hint}", code=2)
    job = given.index("--") if command in ("run", "plan", "check") and "--" in given else len(given)
    chosen, unknown = parser.parse_known_args(given[:job])
    if unknown:
        behind = (
            "; write the command after --: countoff run -- torchrun train.py"
            if command == "run" and not unknown[0].startswith("-")
            else ""
        )
        _refuse_unknown(unknown, chosen.parser, behind)
    chosen.command = given[job + 1 :]
    if chosen.version:
        _print_version()
    elif chosen.run is None:
        parser.print_help()
    else:
        with _needs_extra(str(command)):
            chosen.run(chosen)


def _print_version() -> None:
    from importlib import metadata

    try:
        installed = metadata.version("countoff")
    except metadata.PackageNotFoundError:
        installed = "(run from its sources)"
    print(f"countoff {installed}")


def plan(chosen: argparse.Namespace) -> None:
    """Prints the plan of a run."""
    from countoff.plan import command

    _run(command.plan, chosen)


def check(chosen: argparse.Namespace) -> None:
    """Prints what is wrong with a configuration."""
    from countoff.plan import command

    _run(command.check, chosen)


def explain(chosen: argparse.Namespace) -> None:
    """Prints what names mean."""
    from countoff.cli import explain

    _run(explain.explain, chosen)


def report(chosen: argparse.Namespace) -> None:
    """Draws a trace."""
    from countoff.report import command

    _run(command.report, chosen)


def top(chosen: argparse.Namespace) -> None:
    """Shows what the ranks of a job are doing."""
    from countoff.report import top

    _run(top.top, chosen)


def run(chosen: argparse.Namespace) -> None:
    """Runs a command with the hooks in it."""
    from countoff._run import command

    if not chosen.command:
        _refuse("run needs a command: countoff run -- torchrun --nproc-per-node 8 train.py", code=2)
    if chosen.json and not chosen.dry_run:
        _refuse("--json of countoff run needs --dry-run: the job itself prints what it prints", code=2)
    if chosen.report:
        with _needs_extra("run --report"):  # said before the job, not after it
            import countoff.report.command  # noqa: F401  # pyright: ignore[reportUnusedImport]
    try:
        variables = command.variables(chosen)
        if chosen.dry_run:
            command.describe(chosen.command, variables, as_json=chosen.json)
            return
        directory = command.trace_directory(variables) if chosen.report else ""
        code = command.run(chosen.command, variables)
    except command.CommandError as error:
        _refuse(str(error), code=error.code)
    if directory:
        with contextlib.suppress(SystemExit):  # the exit code is the job's
            main(["report", directory])
    sys.exit(code)


def notify(chosen: argparse.Namespace) -> None:
    """Sends a message to try the addresses."""
    from countoff.core.alerts.notifications import Notifications, NotTold
    from countoff.core.settings import Settings, SettingsError

    del chosen
    try:
        addresses = Settings.of_environment(os.environ).notify
    except SettingsError as error:
        _refuse(str(error), code=2)
    if not addresses:
        _refuse("COUNTOFF_NOTIFY has no address: export COUNTOFF_NOTIFY='slack://… mailto://…'", code=2)
    try:
        failed = Notifications(addresses).send("countoff: a test", "This is how countoff sends a verdict.", kind="info")
    except NotTold as error:
        _refuse(f"not sent: {error}")
    if failed:
        _refuse(f"not taken by {', '.join(failed)}: look at https://appriseit.com/services/, or if its server answers")
    print(f"sent to {count_of(len(addresses), 'receiver')}")


def demo(chosen: argparse.Namespace) -> None:
    """Runs the demonstration."""
    from countoff.cli.demo import DemoFailed, run_demo

    try:
        run_demo(chosen.trace_dir)
    except ImportError as error:
        _refuse(str(error))
    except DemoFailed as error:
        sys.exit(f"countoff: {error}")
    except KeyboardInterrupt:
        _refuse("interrupted; every process of the demo has been ended", code=130)


@contextlib.contextmanager
def _needs_extra(command: str) -> Iterator[None]:
    """A context in which a package of the extra that is not installed becomes one line that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = _EXTRA.get(str(error.name).partition(".")[0])
        if package is None:
            raise
        _refuse(f"{command} needs {package}: pip install 'countoff[cli]'", code=2)


def _run(command: Any, chosen: argparse.Namespace) -> None:
    try:
        code = command(chosen)
    except ValueError as error:
        _refuse(str(error), code=2)
    sys.exit(code)


def _parser(program: str) -> tuple[_Parser, Collection[str]]:
    """Returns the parser, and the names of the commands."""
    parser = _command(_Parser, prog=program, description=_ABOUT)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    add = commands.add_parser
    _plan_arguments(_command(add, "plan", description=_PLAN, help="print the real numbers of a run", run=plan))
    _check_arguments(_command(add, "check", description=_CHECK, help="print what is wrong with a config", run=check))
    _explain_arguments(_command(add, "explain", description=_EXPLAIN, help="print what a message means", run=explain))
    _report_arguments(_command(add, "report", description=_REPORT, help="draw what each rank did", run=report))
    _top_arguments(_command(add, "top", description=_TOP, help="watch a job while it runs", run=top))
    _run_arguments(_command(add, "run", description=_RUN, help="run a job with countoff in it", run=run))
    _demo_arguments(_command(add, "demo", description=_DEMO, help="see it work, with real ranks", run=demo))
    _command(add, "notify", description=_NOTIFY, help="try the addresses that get verdicts", run=notify)
    return parser, commands.choices


def _command(make: Any, *names: str, run: Any = None, **texts: str) -> Any:
    # No abbreviations: a misspelt --dp must not be read as --dp-shard.
    parser = make(*names, formatter_class=_Help, allow_abbrev=False, **texts)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--framework",
        metavar="NAME",
        help="the format of the file, if its fields do not show which; an unknown NAME lists all",
    )
    parser.add_argument(
        "--world-size", action="append", metavar="N[,N…]", help="ranks of the job; or several numbers of ranks"
    )
    parser.add_argument("--nodes", metavar="N", help="machines, in place of --world-size, with --ranks-per-node")
    parser.add_argument("--ranks-per-node", metavar="N", help="ranks on each machine")
    numbers = parser.add_argument_group("the run (a flag wins over the configuration)")
    numbers.add_argument("--batch-size", metavar="N", help="samples per data rank and batch")
    numbers.add_argument("--seq-len", metavar="N", help="tokens per sample")
    numbers.add_argument("--accumulation", metavar="N", help="batches per optimizer step (gradient_accumulation_steps)")
    numbers.add_argument("--global-batch-size", metavar="N", help="samples per optimizer step over all data ranks")
    numbers.add_argument("--steps", metavar="N", help="optimizer steps of the run")
    numbers.add_argument("--epochs", metavar="N", help="passes over the dataset")
    numbers.add_argument(
        "--dataset-size", metavar="N", help="samples of the dataset, sharded as DistributedSampler does"
    )
    numbers.add_argument("--drop-last", action="store_true", help="each data rank drops a last batch that is not full")
    numbers.add_argument(
        "--strided",
        action="store_true",
        help="data rank r of D reads samples r, r + D, r + 2 D, …, not filled up, as in iterable datasets",
    )
    dims = parser.add_argument_group("the mesh (-1: the ranks that the other dims leave over)")
    dims.add_argument("--dp-replicate", metavar="N", help="copies of the model that read different data (DDP)")
    dims.add_argument("--dp-shard", metavar="N", help="ranks that shard the model and read different data (FSDP)")
    dims.add_argument("--cp", metavar="N", help="context parallel: ranks that share each sequence")
    dims.add_argument("--tp", metavar="N", help="tensor parallel: ranks that share each layer")
    dims.add_argument("--pp", metavar="N", help="pipeline parallel: stages of the model")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a file, or module:function")
    _config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for a program")
    parser.add_argument("--explain", action="store_true", help="print where each number comes from")
    parser.add_argument(
        "--resume-samples",
        metavar="N",
        help="samples already seen over all data ranks; prints the batches that each data rank has done",
    )


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="one or more files, or module:function")
    _config_arguments(parser)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="CODE", help="leave out issues with this code, such as dp-rank"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print JSON, for a program")
    shape.add_argument("--github", action="store_true", help="print annotations for a pull request on GitHub")


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="what a message shows, such as UnevenBatches")
    parser.add_argument("--json", action="store_true", help="print JSON, for a program")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a directory with the traces of ranks")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the page goes, in place of the name of the first DIR"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is no page of this command")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--text", action="store_true", help="print the facts as text; a page only with -o or --open")
    printed.add_argument("--json", action="store_true", help="print the facts as JSON; a page only with -o or --open")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write a file for ui.perfetto.dev; a page only with -o or --open"
    )


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="where the job writes its trace; several where hosts write to disks of their own",
    )
    parser.add_argument("--json", action="store_true", help="print this moment as JSON, and end")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options] -- COMMAND…"
    parser.set_defaults(known=["--dry-run", "--json", "--report", *(f"--{name}" for name, _, _ in _SETTINGS)])
    parser.add_argument("--dry-run", action="store_true", help="print what would be hooked, and run nothing")
    parser.add_argument("--json", action="store_true", help="print what --dry-run prints as JSON")
    parser.add_argument("--report", action="store_true", help="write a trace, and draw it when the command has ended")
    settings = parser.add_argument_group("settings")
    for name, metavar, text in _SETTINGS:
        settings.add_argument(f"--{name}", metavar=metavar, help=text)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace-dir", metavar="DIR", help="where the second job writes its trace; nowhere by default")


def _refuse_unknown(arguments: Sequence[str], parser: argparse.ArgumentParser, behind: str) -> NoReturn:
    first = next((one.partition("=")[0] for one in arguments if one.startswith("-")), arguments[0])
    known = [*(parser.get_default("known") or re.findall(r"--[\w-]+", parser.format_usage())), "--help"]
    hint = behind or nearest(first, known) or f"; see {parser.prog} --help"
    _refuse(f"there is no argument {first}{hint}", code=2)


def _refuse(reason: str, code: int = 1) -> NoReturn:
    print(f"countoff: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
