"""A real TRL trainer: supervised fine-tuning of a tiny random Llama, made from a configuration, nothing downloaded."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from countoff.transformers import Countoff
from integration_tests.jobs import own_rank, weights
from integration_tests.trainer_jobs import Truth

WORDS = ["<pad>", "<eos>", "every", "rank", "counts", "off", "and", "is", "named", "if", "out", "of", "step"]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(WORDS))}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def texts(samples: int) -> Iterator[dict[str, str]]:
    for number in range(samples):
        yield {"text": " ".join(WORDS[2 + number % 5 :])}


def fine_tune(samples: Sequence[int], max_steps: int, countoff: bool) -> dict[str, Any]:
    """Fine-tunes on so many texts of each rank, as a stream where ranks differ."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
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
        model=LlamaForCausalLM(config),
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
