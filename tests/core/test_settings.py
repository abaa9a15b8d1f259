"""Options: their precedence, the values that are refused, and errors of one line that name the source of the value."""

import copy
import dataclasses
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core import Finding
from countoff.core.flag import turned_on
from countoff.core.settings import OptionValues, Settings, SettingsError
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("COUNTOFF")]:
        monkeypatch.delenv(variable)


def refusal(**given: object) -> str:
    """The one line with which these arguments, or the environment, are refused."""
    with pytest.raises(SettingsError) as caught:
        Settings.resolve(**given)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_nothing_given_is_the_defaults() -> None:
    assert Settings.resolve() == Settings()


def test_the_defaults_are_the_documented_ones() -> None:
    documented = (True, "raise", {}, "show", "raise", "warn", 180.0, 15.0, 60.0, True, 0, None, None, (), None)
    assert tuple(vars(Settings()).values()) == documented


def test_an_argument_of_none_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFF_TOTALS", "fix")
    assert Settings.resolve(totals=None).totals == "fix"


def test_the_environment_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFF_STALL_SECONDS", "12.5")
    assert Settings.resolve() == Settings(stall_seconds=12.5)


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFF", "0")
    monkeypatch.setenv("COUNTOFF_WEIGHTS_EVERY", "8")
    assert Settings.resolve(enabled=True, weights_every=16) == Settings(weights_every=16)


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFF", "")
    monkeypatch.setenv("COUNTOFF_WEIGHTS_EVERY", " ")
    assert Settings.resolve() == Settings()


def test_a_bad_variable_is_refused_despite_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad variable is refused also if an argument overrides it."""
    monkeypatch.setenv("COUNTOFF_TOTALS", "repair")
    assert "COUNTOFF_TOTALS" in refusal(totals="fix")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("COUNTOFF", "0", "enabled", False),
        ("COUNTOFF", "1", "enabled", True),
        ("COUNTOFF", "FALSE", "enabled", False),
        ("COUNTOFF", "True", "enabled", True),
        ("COUNTOFF", "Off", "enabled", False),
        ("COUNTOFF", "on", "enabled", True),
        ("COUNTOFF", "no", "enabled", False),
        ("COUNTOFF", " YES ", "enabled", True),
        ("COUNTOFF_ON_DIVERGENCE", "warn", "on_divergence", "warn"),
        ("COUNTOFF_TOTALS", "fix", "totals", "fix"),
        ("COUNTOFF_UNEVEN_TRAIN", "stop", "uneven_train", "stop"),
        ("COUNTOFF_LEVELS", "SameOrder=off, Stalled=raise", "levels", {"Stalled": "raise", "SameOrder": "off"}),
        ("COUNTOFF_UNEVEN_EVAL", "allow", "uneven_eval", "allow"),
        ("COUNTOFF_UNEVEN_EVAL", "stop", "uneven_eval", "stop"),
        ("COUNTOFF_UNEVEN_EVAL", "off", "uneven_eval", "off"),
        ("COUNTOFF_STALL_SECONDS", "1e3", "stall_seconds", 1000.0),
        ("COUNTOFF_LOST_SECONDS", "20", "lost_seconds", 20.0),
        ("COUNTOFF_DEADLINE_SECONDS", "5", "deadline_seconds", 5.0),
        ("COUNTOFF_COMPARE_DATA", "off", "compare_data", False),
        ("COUNTOFF_WEIGHTS_EVERY", "1", "weights_every", 1),
        ("COUNTOFF_VERDICT_FILE", "/run/verdict.json", "verdict_file", "/run/verdict.json"),
        ("COUNTOFF_TRACE_DIR", "/runs/today", "trace_dir", "/runs/today"),
        ("COUNTOFF_NOTIFY", "slack://a/b,  mailto://y.org?to=a,b", "notify", ("slack://a/b", "mailto://y.org?to=a,b")),
    ],
)
def test_every_option_has_an_environment_variable(
    variable: str, text: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(Settings.resolve(), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "good"),
    [
        ("COUNTOFF", "2", "1, true, on, yes, 0, false, off, no"),
        ("COUNTOFF_ON_DIVERGENCE", "Raise", "'raise' or 'warn'"),
        ("COUNTOFF_TOTALS", "1", "'show' or 'fix' or 'off'"),
        ("COUNTOFF_UNEVEN_TRAIN", "warn", "'raise' or 'stop'"),
        ("COUNTOFF_UNEVEN_EVAL", "0,1", "'warn' or 'raise' or 'allow' or 'off' or 'stop'"),
        ("COUNTOFF_STALL_SECONDS", "nan", "a finite number of seconds above 0"),
        ("COUNTOFF_LOST_SECONDS", "inf", "a finite number of seconds above 0"),
        ("COUNTOFF_LOST_SECONDS", "-1", "a finite number of seconds above 0"),
        ("COUNTOFF_DEADLINE_SECONDS", "0", "a finite number of seconds above 0"),
        ("COUNTOFF_DEADLINE_SECONDS", "1\nminute", "a finite number of seconds above 0"),
        ("COUNTOFF_WEIGHTS_EVERY", "-1", "0 (off) or a whole number of optimizer steps of at least 1"),
        ("COUNTOFF_WEIGHTS_EVERY", "2.0", "0 (off) or a whole number of optimizer steps of at least 1"),
    ],
)
def test_a_bad_variable_is_refused_with_good_values(
    variable: str, text: str, good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the variable, its text and the accepted values."""
    monkeypatch.setenv(variable, text)
    line = refusal()
    assert line.startswith(f"environment variable {variable} must be ")
    assert good in line
    assert line.endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", 1),
        ("enabled", "on"),
        ("on_divergence", "ignore"),
        ("on_divergence", True),
        ("totals", ["show"]),
        ("uneven_train", "allow"),
        ("levels", {"Stalled": "stop"}),
        ("levels", {"WrongHorizon": "raise"}),
        ("levels", "Stalled=raise"),
        ("uneven_eval", "WARN"),
        ("uneven_eval", (0,)),
        ("stall_seconds", True),
        ("stall_seconds", math.nan),
        ("stall_seconds", math.inf),
        ("stall_seconds", 10**400),
        ("deadline_seconds", -1.0),
        ("deadline_seconds", "60"),
        ("compare_data", 0),
        ("weights_every", -1),
        ("weights_every", True),
        ("weights_every", 64.0),
        ("verdict_file", ""),
        ("verdict_file", " "),
        ("verdict_file", 1),
        ("verdict_file", b"verdict.json"),
        ("verdict_file", "verdict\0.json"),
        ("trace_dir", ""),
        ("trace_dir", 1),
        ("on_finding", "tell"),
        ("notify", True),
        ("notify", ["slack"]),
        ("notify", ["slack://a", 1]),
        ("notify", b"slack://a"),
    ],
)
def test_a_bad_argument_is_refused(name: str, value: object) -> None:
    """A bad argument is refused by resolve and by the class itself."""
    line = refusal(**{name: value})
    assert line.startswith(f"argument `{name}` must be ")
    with pytest.raises(SettingsError, match=name):
        Settings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["slack://hunter2 hunter2", "hunter2", ["slack://hunter2", "://hunter2"]])
def test_no_error_shows_an_address(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address may hold a secret; nor does the settings' own text show one."""
    assert "hunter2" not in refusal(notify=given)
    assert "slack" not in repr(Settings(notify=("slack://hunter2",)))
    monkeypatch.setenv("COUNTOFF_NOTIFY", str(given))
    assert "hunter2" not in refusal()


def test_addresses_need_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said when the settings are made: on the worst day of the month it would be too late."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(notify="slack://a") == "`notify` needs apprise: pip install 'countoff[notify]'"
    assert Settings.resolve(notify=()).notify == ()


@pytest.mark.parametrize("even", [{"uneven_train": "stop"}, {"uneven_eval": "stop"}])
def test_ranks_that_wait_for_one_another_cannot_be_warned_only(even: dict[str, str]) -> None:
    """Where ranks take the same number of batches, a verdict has to end the job."""
    assert refusal(on_divergence="warn", **even).startswith(
        "on_divergence='warn' cannot be combined with uneven_train="
    )
    assert Settings.resolve(**even).keeps_even


def test_a_function_is_an_argument_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no variable, is in no file, and a copy of the settings has the same one."""
    told: list[Finding] = []
    settings = Settings.resolve(on_finding=told.append)
    assert settings.on_finding == told.append
    assert "on_finding" not in settings.without_secrets()
    assert copy.deepcopy(settings).on_finding is settings.on_finding
    monkeypatch.setenv("COUNTOFF_ON_FINDING", "tools:tell")
    assert refusal().startswith("unknown environment variable COUNTOFF_ON_FINDING")


def test_the_environment_completes_a_refused_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFF_ON_DIVERGENCE", "warn")
    assert "on_divergence='warn'" in refusal(uneven_train="stop")


@pytest.mark.parametrize("given", ["verdict.json", Path("verdict.json")])
def test_a_path_keeps_its_place(given: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is absolute from the start, so that it stays the same where the program changes its directory."""
    monkeypatch.chdir(tmp_path)
    assert Settings.resolve(verdict_file=given).verdict_file == str(tmp_path / "verdict.json")


def test_refusals_read_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the lines as they are, with all names that are known."""
    found = [refusal(totals="repair"), refusal(weights_every=-1), refusal(stall_second=5)]
    monkeypatch.setenv("COUNTOFF_STALL_SECONDS", "soon")
    found.insert(2, refusal())
    monkeypatch.delenv("COUNTOFF_STALL_SECONDS")
    monkeypatch.setenv("COUNTOFF_ENABLED", "1")
    found.append(refusal())
    assert "\n```\n" + "\n".join(found) + "\n```\n" in (ROOT / "docs" / "settings.md").read_text()


def test_a_value_with_a_long_repr_is_refused_in_one_line() -> None:
    """A value whose repr has many lines is refused in one line."""

    class Tall:
        def __repr__(self) -> str:
            return "Tall(\n  1\n)"

    assert refusal(totals=Tall()).endswith("got Tall( 1 )")


def test_a_misspelt_argument_is_refused_with_the_nearest_name() -> None:
    line = refusal(on_diverge="warn")
    assert line.startswith("unknown argument `on_diverge`; did you mean on_divergence?; known: enabled, ")


def test_an_unknown_argument_is_refused_with_the_functions_own() -> None:
    """A function that takes options lists its own arguments too, and the nearest may be one of them."""
    with pytest.raises(SettingsError) as refused:
        Settings.resolve("optimizer", "epochs", "start_step", start_steps=3)
    assert str(refused.value).startswith(
        "unknown argument `start_steps`; did you mean start_step?; known: optimizer, epochs, start_step, enabled, "
    )


@pytest.mark.parametrize(
    ("adapter", "given", "own"),
    [
        ("torch", {}, "optimizer, scheduler, .*mesh, "),
        ("accelerate", {"accelerator": None}, "accelerator, epochs, "),
        ("fabric", {"fabric": SimpleNamespace(strategy=None)}, "fabric, optimizer, "),
        ("lingua", {"args": None, "mesh": None, "dp_rank": 0, "dp_degree": 1}, "args, mesh, "),
    ],
)
def test_an_adapters_own_arguments_are_listed(adapter: str, given: dict[str, Any], own: str) -> None:
    """`Countoff(passes=3)` is refused with all arguments that it has."""
    module = pytest.importorskip(f"countoff.{adapter}", exc_type=ImportError)
    with pytest.raises(SettingsError, match=f"unknown argument `passes`.*; known: {own}.*enabled, "):
        module.Countoff(**given, passes=3)


@pytest.mark.parametrize("adapter", ["lightning", "pytorch_lightning", "transformers", "composer"])
def test_a_misspelt_option_of_a_callback_is_refused_with_the_nearest_name(adapter: str) -> None:
    """A callback refuses an option that it does not have as a loop's `Countoff` does."""
    module = pytest.importorskip(f"countoff.{adapter}", exc_type=ImportError)
    with pytest.raises(SettingsError) as refused:
        module.Countoff(unevn_train="stop")
    line = str(refused.value)
    assert line.startswith("unknown argument `unevn_train`; did you mean uneven_train?; known: enabled, ")
    assert len(line.splitlines()) == 1


def test_an_argument_unlike_any_is_refused_without_a_guess() -> None:
    assert "did you mean" not in refusal(xyz=1)


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("COUNTOFF_ON_DIVERGANCE", "COUNTOFF_ON_DIVERGENCE"),
        ("COUNTOFF_WEIGHT_EVERY", "COUNTOFF_WEIGHTS_EVERY"),
        ("COUNTOFF_ENABLED", "COUNTOFF"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(
    variable: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert refusal().startswith(f"unknown environment variable {variable}; did you mean {near}?")


def test_variables_of_kubernetes_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables that Kubernetes sets for a Service named countoff are ignored."""
    monkeypatch.setenv("COUNTOFF_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("COUNTOFF_PORT_80_TCP", "tcp://10.0.0.7:80")
    assert Settings.resolve() == Settings()


def test_a_variable_of_another_program_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFFICE_HOURS", "9-5")
    assert Settings.resolve() == Settings()


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_seconds_are_equal_from_code_and_environment(seconds: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTOFF_STALL_SECONDS", repr(seconds))
        assert Settings.resolve() == Settings.resolve(stall_seconds=seconds)


def test_settings_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Settings().totals = "fix"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["1", "on", "TRUE", "yes"])
def test_a_factory_is_on_where_the_flag_is_on(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTOFF", text)
    assert turned_on()


@pytest.mark.parametrize("text", [None, "", " ", "0", "off", "False", "no"])
def test_a_factory_is_off_where_the_flag_is_off_or_absent(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        monkeypatch.setenv("COUNTOFF", text)
    assert not turned_on()


def test_a_bad_flag_reaches_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is neither on nor off turns the factory on, and the settings then refuse it."""
    monkeypatch.setenv("COUNTOFF", "maybe")
    assert turned_on()
    assert refusal().startswith("environment variable COUNTOFF must be True or False")


@pytest.mark.parametrize(
    ("levels", "reason"),
    [
        ({"stalled": "raise"}, "unknown kind 'stalled'; did you mean Stalled?"),
        ({"WrongHorizon": "raise"}, "WrongHorizon accepts 'warn' or 'off', not 'raise'"),
    ],
)
def test_a_refused_level_has_its_reason(levels: dict[str, str], reason: str) -> None:
    assert refusal(levels=levels).endswith(reason)


@pytest.mark.parametrize("even", [{"uneven_train": "stop"}, {"uneven_eval": "stop"}])
@pytest.mark.parametrize("kind", ["PlanMismatch", "UnevenBatches", "LostRank", "LateRank"])
def test_ranks_that_wait_for_one_another_must_end_together(even: dict[str, str], kind: str) -> None:
    assert f"levels={{'{kind}': 'warn'}} cannot be combined" in refusal(levels={kind: "warn"}, **even)


def test_type_checkers_know_each_option() -> None:
    """`OptionValues` has the options of `Settings`, in their order."""
    assert list(OptionValues.__annotations__) == [field.name for field in dataclasses.fields(Settings)]
