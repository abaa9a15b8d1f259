"""TorchTitan's own trainer on two CPU ranks; skipped where TorchTitan 0.3 is missing: see `make test-torchtitan`."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.torchrun import CompletedRun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="TorchTitan is not installed: pip install torchtitan triton"
)
WORDS = 200


def write_assets(directory: Path) -> None:
    """A tokenizer of words, a text that both ranks share evenly, and one whose second half is shorter."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    split = {"type": "Whitespace"}
    whole = {"version": "1.0", "model": model, "pre_tokenizer": split, "added_tokens": []}
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "tokenizer.json").write_text(json.dumps(whole))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    for name, lengths in {"text": [40] * 40, "uneven": [40] * 20 + [20] * 20}.items():
        (directory / name).mkdir()
        lines = [
            " ".join(f"w{(line * 7 + word) % WORDS}" for word in range(length)) for line, length in enumerate(lengths)
        ]
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (directory / name / "text.json").write_text(text)


def test_torchtitans_trainer_is_counted_and_named(run_torchrun: Callable[..., CompletedRun], tmp_path: Path) -> None:
    """TorchTitan's own trainer is counted, and its short rank is named."""
    write_assets(tmp_path)
    job = Path(__file__).with_name("titan_job.py")
    run = run_torchrun(job, 2, str(tmp_path), env={"HF_HUB_OFFLINE": "1"}, deadline_seconds=900)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        # 4 steps of 2 batches: 8 samples per step over 2 data ranks of 2 each.
        assert [found[name]["step"] for name in found] == [4, 4]
        assert [found[name]["counted"] for name in found] == [[8, 4], [8, 4]]
        assert found["healthy"]["warned"] == []
        assert "learning rate is negative" in found["short horizon"]["warned"][0]
    logged = ranks[0]["healthy"]["logged"]
    expected = {"global_batch_size": 8, "tokens_per_step": 256, "total_tokens": 1024, "steps": 4}
    assert logged == {f"countoff/{name}": value for name, value in expected.items()}
    # The program then reads a text that is uneven: both ranks end with the reason, in Python or in a collective.
    assert run.exit_code == 1
    for rank in range(2):
        assert (
            f"[rank {rank}] countoff: UnevenBatches: rank 1 ran out of data after 7 batches of train epoch 0"
            in run.output
        )


def test_torchtitans_own_configs_are_read_at_the_prompt() -> None:
    """`countoff check` reads TorchTitan's own configurations."""
    command = [
        sys.executable,
        "-m",
        "countoff.cli.__main__",
        "plan",
        "llama3:llama3_debugmodel",
        "--world-size",
        "4,16",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    plans = json.loads(done.stdout)
    assert [plan["tokens_per_step"] for plan in plans] == [65_536, 262_144]
    assert [plan["issues"] for plan in plans] == [[], []]
