"""Other projects' tests without and with countoff: what counts as a difference, and Accelerate's scripts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from integration_tests.suites import comparison, expected
from integration_tests.suites.__main__ import main
from integration_tests.suites.comparison import Outcome, Outcomes, Run, compare

PASSED, FAILED = Outcome("passed"), Outcome("failed", "AssertionError: three callbacks")


def runs(*outcomes: tuple[Outcomes, Outcomes]) -> tuple[Run, list[Sequence[str]]]:
    """Returns a run that answers with these outcomes in turn, without and with countoff, and what it was asked for."""
    turns = {False: [each[0] for each in outcomes], True: [each[1] for each in outcomes]}
    asked: list[Sequence[str]] = []

    def run(counting: bool, tests: Sequence[str]) -> Outcomes:
        asked.append(tests)
        return turns[counting].pop(0)

    return run, asked


def test_a_difference_counts_if_it_repeats() -> None:
    """A test that fails now and then by itself is no difference."""
    first = {"0 a": PASSED, "0 b": PASSED, "0 c": FAILED}, {"0 a": FAILED, "0 b": FAILED, "0 c": FAILED}
    again = {"0 a": PASSED, "0 b": PASSED}, {"0 a": FAILED, "0 b": PASSED}
    run, asked = runs(first, again)
    without, differences = compare("lightning", run)
    assert without == first[0]
    assert asked[2:] == [["a", "b"]] * 2
    assert [(each.test, each.counted, each.reason) for each in differences] == [("0 a", FAILED, "")]


def test_a_word_on_a_test_that_passes_is_a_difference() -> None:
    """countoff must print nothing in a healthy job."""
    spoken = {"0 a": Outcome("passed", words=("[rank 0] countoff: LateRank: …",))}
    run, _ = runs(({"0 a": PASSED}, spoken), ({"0 a": PASSED}, spoken))
    assert [each.test for each in compare("lightning", run)[1]] == ["0 a"]


def test_an_expected_difference_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is that of the pattern which the test's name matches."""
    monkeypatch.setitem(expected.EXPECTED, "lightning", {"*[[]two]": "because", "*b": "otherwise"})
    both = {"0 x::a[two]": PASSED}, {"0 x::a[two]": FAILED}
    run, _ = runs(both, both)
    (difference,) = compare("lightning", run)[1]
    assert difference.reason == "because"
    assert difference.lines()[0] == "0 x::a[two]: passed without, failed with countoff"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lightning"], "needs the path of a checkout"),
        (["lightning", "nowhere"], "is no directory"),
        (["x"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing checkout is told in one line."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert words in capsys.readouterr().err


def test_a_suite_in_which_no_test_passes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Composer's tests are all skipped where one package is missing: that is no proof that nothing differs."""
    tests, arguments = tmp_path / "tests" / "tests_pytorch", ["lightning", str(tmp_path), "--parts", "tests_pytorch"]
    tests.mkdir(parents=True)
    skipped = "import pytest\n\ndef test_one():\n    pytest.importorskip('no_such_package')\n"
    tests.joinpath("test_skipped.py").write_text(skipped, encoding="utf-8")
    assert main(arguments) == 1
    assert capsys.readouterr().out.splitlines() == [
        "lightning: 1 skipped",
        "0 differences, 0 of them unexpected",
        "nothing was compared: without countoff no test passed. For the reasons: --pytest -rs",
    ]
    tests.joinpath("test_passed.py").write_text("def test_two():\n    pass\n", encoding="utf-8")
    assert main(arguments) == 0


@pytest.mark.nightly
def test_accelerates_own_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks, in a fit with each Accelerator, the scripts that Accelerate ships end as without countoff."""
    code = main(["accelerate"])
    assert code == 0, capsys.readouterr().out


def test_the_environment_turns_countoff_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of whoever runs the suite does not get through."""
    monkeypatch.setenv("COUNTOFF_TOTALS", "0")
    for counting in (False, True):
        env = comparison.environment(counting, "lightning")
        assert {name: value for name, value in env.items() if name.startswith("COUNTOFF")} == {
            "COUNTOFF": str(int(counting))
        }
