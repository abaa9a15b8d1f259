"""Real TRL trainers: fine-tuning and GRPO of a tiny random Llama, made from a configuration, nothing downloaded."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (  # trl is typed by its private modules
    GRPOConfig,  # pyright: ignore[reportPrivateImportUsage]
    GRPOTrainer,  # pyright: ignore[reportPrivateImportUsage]
    SFTConfig,  # pyright: ignore[reportPrivateImportUsage]
    SFTTrainer,  # pyright: ignore[reportPrivateImportUsage]
)

from countoff.transformers import Countoff
from integration_tests.digits import own_rank, weights
from integration_tests.trainer_jobs import Truth

WORDS = ["<pad>", "<eos>", "every", "rank", "counts", "off", "and", "is", "named", "if", "out", "of", "step"]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(WORDS))}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    takes = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", model_input_names=takes
    )


def texts(samples: int) -> Iterator[dict[str, str]]:
    for number in range(samples):
        yield {"text": " ".join(WORDS[2 + number % 5 :])}


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def fine_tune(samples: Sequence[int], max_steps: int, countoff: bool) -> dict[str, Any]:
    """Fine-tunes on so many texts of each rank, as a stream where ranks differ."""
    torch.manual_seed(7)
    mine = samples[own_rank()]
    uneven = len(set(samples)) > 1
    data = (
        IterableDataset.from_generator(texts, gen_kwargs={"samples": mine})
        if uneven
        else Dataset.from_list([*texts(mine)])
    )
    callback = Countoff()
    truth = Truth()
    trainer = SFTTrainer(
        model=llama(),
        args=SFTConfig(
            output_dir="out",
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            max_steps=max_steps,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            accelerator_config={"dispatch_batches": False},
        ),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=[truth, *([callback] if countoff else [])],
    )
    trainer.train()
    counted = callback.guard.steps if callback.guard else 0
    return {"weights": weights(trainer.model), "steps": trainer.state.global_step, "counted": counted}


def with_and_without(samples: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    return fine_tune(samples, -1, False), fine_tune(samples, -1, True)


def rewards(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


def reinforce(steps: int, accumulation: int) -> dict[str, float]:
    """Trains by GRPO, whose loader's batch has the prompts of several steps; returns countoff's last totals."""
    torch.manual_seed(7)
    words = tokenizer()
    callback = Countoff()
    trainer = GRPOTrainer(
        model=llama(),
        reward_funcs=rewards,  # pyright: ignore[reportArgumentType]  # trl calls it by keywords
        args=GRPOConfig(
            output_dir="out",
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            num_generations=2,
            max_completion_length=4,
            max_steps=steps,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": " ".join(WORDS[2 + number % 5 :])} for number in range(16)]),
        processing_class=words,
        callbacks=[callback],
    )
    trainer.train()
    assert trainer.state.global_step == steps
    return callback.progress()
