"""Records the advantages, losses and gradients of TRL's PPO on random answers, with which a test compares ours.

    python -m venv ppo && ppo/bin/pip install "trl==1.12.*" torch && ppo/bin/python scripts/record_trl_ppo.py

Writes tests/step/objectives/trl_ppo.npz, with the versions in it. TRL 1.12 has PPO, 1.16 no longer. This script calls its
functions for means and whitening under a mask (`masked_mean`, `masked_whiten`). All else is inside `PPOTrainer.train`
(trl/experimental/ppo/ppo_trainer.py), in steps 3 to 6 and the inner loop, and is copied here in PyTorch, formula by
formula.

TRL gives the score of a padded answer one token after its end, at a state that has a value too. An answer that fills its row
gets the score at its last token, like all of ours. So there are two recordings: `padded_` has answers padded to one length; the
other has each answer in a row of its own length, and joins the answers for whitening and for the losses.
"""

import argparse
import importlib.metadata
import pathlib

import numpy as np
import torch
from trl.experimental.ppo import ppo_trainer

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 3, 1)
SETTINGS = {"beta": 0.07, "gamma": 0.97, "gae_lambda": 0.93, "clip": 0.2, "value_clip": 0.15, "value_weight": 0.3}
DEFAULT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "step" / "objectives" / "trl_ppo.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, nargs="?", default=DEFAULT)
    given = drawn()
    versions = {f"version_{name}": importlib.metadata.version(name) for name in ("trl", "torch", "numpy")}
    arrays = {name: x.numpy() for name, x in (given | together(given) | padded(given)).items()}
    out = parser.parse_args().out
    np.savez_compressed(out, lengths=np.asarray(LENGTHS), **SETTINGS, **versions, **arrays)
    print(f"{out}: {', '.join(f'{name} {x.shape}' for name, x in arrays.items())}")


def drawn() -> dict[str, torch.Tensor]:
    """Returns random inputs: log-probabilities (nats) and values by token, [answers, longest + 2]; a score per answer."""
    torch.manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS) + 2)
    old = -3 * torch.rand(shape)
    values = torch.randn(shape)
    return {
        "old": old,
        "reference": old + 0.5 * torch.randn(shape),
        "new": old + 0.3 * torch.randn(shape),
        "values": values,
        "new_values": values + 0.3 * torch.randn(shape),
        "scores": torch.randn(len(LENGTHS)),
    }


def gae(rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages, returns) of rows [answers, tokens], from the last token back; the value after it is 0."""
    columns, carried = [], torch.zeros(len(rewards))
    after = torch.cat([values[:, 1:], torch.zeros(len(rewards), 1)], dim=1)
    for t in range(rewards.shape[1] - 1, -1, -1):
        step = rewards[:, t] + SETTINGS["gamma"] * after[:, t] - values[:, t]
        carried = step + SETTINGS["gamma"] * SETTINGS["gae_lambda"] * carried
        columns.insert(0, carried)
    advantages = torch.stack(columns, dim=1)
    return advantages, advantages + values


def penalty(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns each token's reward without the score: -beta times the estimator k1 of the KL divergence."""
    return -SETTINGS["beta"] * (given["old"] - given["reference"])


def together(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns advantages of answers in rows of their own lengths, whitened together, and losses and gradients of all tokens."""
    found = {name: torch.zeros(given["old"].shape) for name in ("advantages", "returns")}
    inside = torch.arange(given["old"].shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    for i, length in enumerate(LENGTHS):
        rewards = penalty(given)[i : i + 1, :length].clone()
        rewards[0, -1] += given["scores"][i]
        for name, x in zip(found, gae(rewards, given["values"][i : i + 1, :length]), strict=True):
            found[name][i, :length] = x
    whitened = ppo_trainer.masked_whiten(found["advantages"], inside).masked_fill(~inside, 0)
    return found | {"whitened": whitened} | losses(given, whitened, found["returns"], inside)


def losses(
    given: dict[str, torch.Tensor], advantages: torch.Tensor, returns: torch.Tensor, inside: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the clipped losses of policy and value, the clipped shares, and the gradients of the summed loss."""
    new, values = (given[name].clone().requires_grad_() for name in ("new", "new_values"))
    ratio = (new - given["old"]).exp()
    surrogates = [-advantages * r for r in (ratio, ratio.clamp(1 - SETTINGS["clip"], 1 + SETTINGS["clip"]))]
    limits = given["values"] - SETTINGS["value_clip"], given["values"] + SETTINGS["value_clip"]
    squares = [(v - returns).square() for v in (values, values.clamp(*limits))]
    policy_loss = ppo_trainer.masked_mean(torch.maximum(*surrogates), inside)
    value_loss = 0.5 * ppo_trainer.masked_mean(torch.maximum(*squares), inside)
    loss = policy_loss + SETTINGS["value_weight"] * value_loss
    loss.backward()
    found = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "loss": loss,
        "clip_share": ppo_trainer.masked_mean((surrogates[1] > surrogates[0]).float(), inside),
        "value_clip_share": ppo_trainer.masked_mean((squares[1] > squares[0]).float(), inside),
        "d_new": new.grad,
        "d_new_values": values.grad,
    }
    return {name: x.detach() for name, x in found.items()}


def padded(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns rewards, advantages and returns of padded answers, whose score comes one token after the end."""
    tokens, lengths = torch.arange(given["old"].shape[1])[None], torch.tensor(LENGTHS)[:, None]
    rewards = penalty(given).masked_fill(tokens >= lengths, 0) + given["scores"][:, None] * (tokens == lengths)
    values = given["values"].masked_fill(tokens > lengths, 0)
    advantages, returns = gae(rewards, values)
    return {"padded_rewards": rewards, "padded_advantages": advantages, "padded_returns": returns}


if __name__ == "__main__":
    main()
