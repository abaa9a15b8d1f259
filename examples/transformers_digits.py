"""The transformers Trainer on real digits, with ranks that are uneven because of a setting meant for evaluation.

    torchrun --standalone --nproc-per-node 2 examples/transformers_digits.py
    torchrun --standalone --nproc-per-node 2 examples/transformers_digits.py --fixed

`even_batches: False` stops Accelerate from repeating samples. Of the 47 batches of the train loader, one rank then gets
24 and the other 23, so one rank plans 240 steps and the other 230. Without the callback (COUNTOFF=0) the job drifts,
then hangs. With it every rank stops before the first batch, with the same verdict. `--fixed` leaves the setting out.
Runs on the CPU, with gloo.

Needs: pip install 'countoff[transformers]' scikit-learn
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

from countoff.transformers import Countoff

HELD_OUT, BATCH_SIZE, EPOCHS = 293, 32, 10  # 1504 digits to train on: 47 batches


class Network(torch.nn.Module):
    """A model as the Trainer expects it: its output is a dict with the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, images, labels):
        logits = self.layers(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="give every rank the same number of batches")
    fixed = parser.parse_args().fixed

    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    trainer = Trainer(
        model=Network(),
        args=TrainingArguments(
            output_dir="digits",
            use_cpu=True,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=BATCH_SIZE,
            learning_rate=0.01,
            accelerator_config={"even_batches": fixed},
            label_names=["labels"],
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]),
        eval_dataset=TensorDataset(images[:HELD_OUT], labels[:HELD_OUT]),
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=[countoff := Countoff()],  # the only change
    )
    trainer.train()

    if trainer.is_world_process_zero():
        batches = countoff.progress().get("countoff/batches_per_epoch", "uncounted")
        last = next(line for line in reversed(trainer.state.log_history) if "eval_accuracy" in line)["eval_accuracy"]
        print(f"trained {EPOCHS} epochs of {batches} batches on each rank; accuracy on held-out digits {last:.3f}")


if __name__ == "__main__":
    main()
