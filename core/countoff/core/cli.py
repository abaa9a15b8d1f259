"""The command line. It starts without torch: what a command needs is imported when the command runs."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, NoReturn

import typer

_RANKS = range(2, 65)
_MAX_SECONDS = 60.0

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line; the console script `countoff`."""
    app()


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def countoff(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Names the training rank that is out of step before it hangs, drifts or quietly corrupts the job.

    In your own job, one line does it:

        from countoff.lightning import Countoff
        trainer = Trainer(callbacks=[Countoff()])

    See it work, with real ranks on this machine:

        countoff demo --ranks 4
    """


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"countoff {_installed_version()}")


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Ranks to start on this machine, 2 to 64.")] = 4,
    seconds_before_cut: Annotated[
        float, typer.Option(help="Seconds without progress after which the hanging job is cut off.")
    ] = 6.0,
) -> None:
    """A real Lightning job with one short rank: adrift, then named by countoff, then mended.

    It trains on scikit-learn's digits, on the CPU, in under two minutes, and leaves nothing behind.
    """
    if ranks not in _RANKS:
        _refuse(f"--ranks must be a whole number from {_RANKS.start} to {_RANKS.stop - 1}, got {ranks}", code=2)
    if not 0 < seconds_before_cut <= _MAX_SECONDS:
        what = f"above 0 and at most {_MAX_SECONDS:g}"
        _refuse(f"--seconds-before-cut must be a number {what}, got {seconds_before_cut:g}", code=2)
    try:
        from countoff.demo import DemoFailed, run_demo
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("countoff"):
            raise
        _refuse("this countoff was installed without its plugins: pip install 'countoff[demo]'")
    try:
        run_demo(ranks=ranks, seconds_before_cut=seconds_before_cut)
    except (DemoFailed, ImportError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        _refuse("interrupted; every process of the demo has been ended", code=130)


def _installed_version() -> str:
    try:
        return metadata.version("countoff")
    except metadata.PackageNotFoundError:
        return "(run from its sources)"


def _refuse(reason: str, code: int = 1) -> NoReturn:
    print(f"countoff: {reason}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
