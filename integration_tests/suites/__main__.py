"""The command line: ``python -m integration_tests.suites``; see the package's docstring."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from integration_tests.suites.comparison import Run, compare, pytest_suite, script_suite

SCRIPTS = [f"accelerate.test_utils.scripts.{name}" for name in ("test_cli", "test_ops", "test_sync", "test_script")]
"""The scripts of the installed Accelerate that run on two CPU ranks within minutes and download nothing."""
PARTS = {
    "accelerate": ["tests/test_accelerator.py", "tests/test_data_loader.py", "tests/test_scheduler.py"],
    "lightning": [f"tests_pytorch/{part}" for part in ("callbacks", "loops", "trainer", "checkpointing")],
    "composer": ["tests/trainer", "tests/callbacks", "tests/loggers", "tests/test_events.py", "tests/test_time.py"],
}
OPTIONS = {
    # Composer's own options need a plugin of pytest. Two of its test files import transformers, which is hidden here.
    "composer": [
        "-o",
        "addopts=",
        "-m",
        "not gpu and not doctest and not daily and not remote",
        "--continue-on-collection-errors",
    ],
}
"""Options of pytest that a suite needs."""
PASSED = ("passed", "exit code 0")
EPILOG = """\
examples:
  python -m integration_tests.suites accelerate                         the scripts that the installed package ships
  python -m integration_tests.suites accelerate ~/accelerate            a checkout's tests
  python -m integration_tests.suites lightning ~/pytorch-lightning --parts tests_pytorch/loops
  python -m integration_tests.suites lightning ~/pytorch-lightning --pytest --timeout=180      needs pytest-timeout
  python -m integration_tests.suites composer ~/composer --ranks 2                 needs mlflow-skinny, torchvision

A test that ends otherwise with countoff, or in which countoff prints something, is a difference. The expected ones
stand in integration_tests/suites/expected.py. The exit code is 1 if there is another one, or if no test passed.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a suite both ways and prints the differences; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.suites",
        description="Runs another project's own tests without countoff and with it, and prints what differs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=PARTS)
    parser.add_argument(
        "checkout", type=Path, nargs="?", help="the project's checkout; Accelerate ships scripts without"
    )
    parser.add_argument("--parts", nargs="+", metavar="PATH", help="files and folders to run instead of the usual ones")
    parser.add_argument("--ranks", type=int, default=None, help="ranks; 1 by default, 2 for Accelerate's scripts")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], metavar="OPTION", help="options of pytest")
    options = parser.parse_args(arguments)
    if options.checkout is None and options.suite != "accelerate":
        parser.error(f"{options.suite} needs the path of a checkout: its package ships no tests")
    if options.checkout is not None and not options.checkout.is_dir():
        parser.error(f"{options.checkout} is no directory")
    without, differences = compare(options.suite, _run(options))
    print(
        f"{options.suite}: "
        + ", ".join(f"{n} {what}" for what, n in Counter(o.outcome for o in without.values()).items())
    )
    for difference in differences:
        print(*difference.lines(), sep="\n")
    unexpected = sum(not difference.reason for difference in differences)
    print(f"{len(differences)} differences, {unexpected} of them unexpected")
    if not any(outcome.outcome in PASSED for outcome in without.values()):
        print("nothing was compared: without countoff no test passed. For the reasons: --pytest -rs")
        return 1
    return int(unexpected > 0)


def _run(options: argparse.Namespace) -> Run:
    if options.checkout is None:
        return script_suite("accelerate", options.parts or SCRIPTS, options.ranks or 2)
    # Lightning's tests are imported from its folder `tests`, the others' from the checkout itself.
    lightning = options.suite == "lightning"
    directory = options.checkout.resolve() / "tests" if lightning else options.checkout.resolve()
    given = [*OPTIONS.get(options.suite, []), *options.pytest]
    return pytest_suite(options.suite, directory, options.parts or PARTS[options.suite], given, options.ranks or 1)


if __name__ == "__main__":
    sys.exit(main())
