"""The name that was probably meant: the nearest, and several only where they are equally near."""

import pytest

from countoff.core.messages import nearest


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("chek", ["plan", "check", "explain"], "check"),
        ("--world", ["--world-size", "--word"], "--world-size"),
        ("LR_SCHEDULER", ["optimizer", "lr_scheduler"], "lr_scheduler"),
        ("--xp", ["--cp", "--tp", "--dp-shard", "--pp"], "--cp, --tp or --pp"),
        ("--lr", ["--lr", "--lr-batch"], "--lr or --lr-batch"),
        ("--d", ["--drop-last"], ""),
        ("weather", ["plan", "check"], ""),
        ("", ["plan"], ""),
        ("plan", [], ""),
    ],
)
def test_the_nearest_name_is_named(name: str, known: list[str], meant: str) -> None:
    assert nearest(name, known) == (f"; did you mean {meant}?" if meant else "")
