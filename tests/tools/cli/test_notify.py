"""`countoff notify`, with a receiver on this machine."""

import pytest

from countoff.cli.__main__ import main
from tests.receiver import breaks, receiving


def ended(capfd: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    code: object = 0
    try:
        main(["notify"])
    except SystemExit as error:
        code = error.code
    printed = capfd.readouterr()
    return code, printed.out, printed.err


def test_a_test_message(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("COUNTOFF_NOTIFY", f"json://{receiver.place}")
        assert ended(capfd) == (0, "sent to 1 receiver\n", "")
    assert [(body["title"], body["type"]) for body in receiver.bodies] == [("countoff: a test", "info")]


def test_who_has_not_taken_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """By what is no secret of the address."""
    with receiving(breaks) as receiver:
        monkeypatch.setenv("COUNTOFF_NOTIFY", f"json://me:hunter2@{receiver.place} slak://hunter2")
        line = "countoff: not taken by address 1 (json), address 2 (slak): look at https://appriseit.com/services/, "
        assert ended(capfd) == (1, "", f"{line}or if its server answers\n")


@pytest.mark.parametrize("text", [None, ""])
def test_without_addresses(
    text: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COUNTOFF_NOTIFY", raising=False)
    if text is not None:
        monkeypatch.setenv("COUNTOFF_NOTIFY", text)
    line = "countoff: COUNTOFF_NOTIFY has no address: export COUNTOFF_NOTIFY='slack://… mailto://…'\n"
    assert ended(capfd) == (2, "", line)


def test_a_bad_address_is_not_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COUNTOFF_NOTIFY", "hunter2")
    code, _, line = ended(capfd)
    assert code == 2
    assert line.startswith("countoff: environment variable COUNTOFF_NOTIFY must be one or more addresses ")
    assert "hunter2" not in line
