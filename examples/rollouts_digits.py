"""A loop in the shape of PPO or GRPO: each rank plays for as long as it likes, then all ranks update together.

    torchrun --standalone --nproc-per-node 2 examples/rollouts_digits.py
    torchrun --standalone --nproc-per-node 2 examples/rollouts_digits.py --keep-all

In a game, the policy names digits until it is wrong, eight at most. So games are of different lengths, and no rank
plays as many as another one. That is as it should be, and nothing of it is counted. The updates are: their gradients
are averaged, so each rank must have the same number of minibatches. Here, each rank keeps 256 decisions of its games.
With `--keep-all` it keeps them all: a common mistake, because some ranks then have a minibatch more. Runs on the CPU,
with gloo.

Needs: pip install 'countoff[torch]' scikit-learn
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from countoff.torch import Countoff

HELD_OUT, DECISIONS, MINIBATCH, PASSES, ITERATIONS, LONGEST_GAME = 293, 256, 32, 4, 20, 8


class Rollouts:
    """What this rank has played last, as shuffled minibatches of (image, choice, log-probability, advantage)."""

    def __init__(self, images, labels, keep_all):
        self.images, self.labels, self.keep_all = images, labels, keep_all
        self.chance = torch.Generator().manual_seed(dist.get_rank())  # other digits on each rank
        self.data = []

    @torch.no_grad()
    def play(self, policy):
        """Plays games until there are enough decisions; returns how many were right."""
        shown, choices, chances, rewards = [], [], [], []
        while len(rewards) < DECISIONS:
            for index in torch.randint(len(self.images), (LONGEST_GAME,), generator=self.chance):
                choice = Categorical(logits=policy(self.images[index]))
                chosen = torch.multinomial(choice.probs, 1, generator=self.chance)[0]
                shown.append(self.images[index])
                choices.append(chosen)
                chances.append(choice.log_prob(chosen))
                rewards.append(float(chosen == self.labels[index]))
                if not rewards[-1]:
                    break
        kept = len(rewards) if self.keep_all else DECISIONS
        advantages = torch.tensor(rewards) - sum(rewards) / len(rewards)
        self.data = [
            part[:kept] for part in (torch.stack(shown), torch.stack(choices), torch.stack(chances), advantages)
        ]
        return sum(rewards) / len(rewards)

    def __iter__(self):
        order = torch.randperm(len(self.data[0]), generator=self.chance)
        for indices in order.split(MINIBATCH):
            yield [part[indices] for part in self.data]


def loss_of(logits, choices, old_chances, advantages):
    """PPO's clipped objective (Schulman et al., 2017, arXiv:1707.06347, equation 7)."""
    ratios = (Categorical(logits=logits).log_prob(choices) - old_chances).exp()
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep-all", action="store_true", help="update on all decisions of the games: uneven ranks")
    keep_all = parser.parse_args().keep_all
    dist.init_process_group("gloo")

    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    rollouts = Rollouts(images[HELD_OUT:], labels[HELD_OUT:], keep_all)

    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    countoff = Countoff(model=model, optimizer=optimizer, batch_size=MINIBATCH)
    for iteration in range(ITERATIONS):
        rollouts.play(network)  # nothing is counted here, and no collective is in it
        for number in range(PASSES):
            for shown, choices, old_chances, advantages in countoff.train(rollouts, epoch=iteration * PASSES + number):
                loss_of(model(shown), choices, old_chances, advantages).backward()
                optimizer.step()
                optimizer.zero_grad()

    countoff.close()
    if dist.get_rank() == 0:
        accuracy = (network(images[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]).double().mean().item()
        steps = ITERATIONS * PASSES * DECISIONS // MINIBATCH
        print(f"played {ITERATIONS} times, {steps} updates on each rank; accuracy on held-out digits {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
