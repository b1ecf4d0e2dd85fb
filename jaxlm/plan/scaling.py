"""Published scaling laws, which predict how many tokens suit a model's size and the final loss.

Both laws are L(N, D) = E + A / N^alpha + B / D^beta, for N parameters and D tokens, in nats per token OF THEIR OWN TOKENIZER
AND TEXT (MassiveText, 32,000 ids of SentencePiece). Another tokenizer or other data give other losses: compare two plans by
these numbers, never a plan with a loss that you have measured.
"""

import dataclasses
import math

# Share of the mean that widens the span of the two laws on both sides. The laws' own residuals are near 1%, but other data
# and tokenizers move losses by much more.
UNCERTAINTY = 0.10


@dataclasses.dataclass(frozen=True)
class Law:
    """L(N, D) = e + a / N^alpha + b / D^beta."""

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Returns the predicted loss in nats per token."""
        return self.e + self.a / params**self.alpha + self.b / tokens**self.beta

    def optimal_tokens(self, params: float) -> float:
        """Returns the number of tokens D for which `params` is the best N at a budget of 6ND FLOPs."""
        return (self.beta * self.b / (self.alpha * self.a) * params**self.alpha) ** (1 / self.beta)


LAWS = (
    Law("Hoffmann et al. 2022, approach 3 (arXiv:2203.15556)", 1.69, 406.4, 410.7, 0.34, 0.28),
    Law("Besiroglu et al. 2024, re-fit (arXiv:2404.10102)", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
)
TOKENS_PER_PARAM = 20.0  # the rule of thumb that Hoffmann et al.'s approaches 1 and 2 come to


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What the laws predict for a plan.

    Attributes:
      tokens_per_param: the plan's tokens for each parameter.
      optimal_tokens: the optimal number of tokens by the rule of 20 tokens a parameter.
      optimal_by_law: law's name -> optimal number of tokens for this size.
      loss_by_law: law's name -> predicted final loss in nats per token.
      loss: the mean of the laws' losses; None if one of them is worse than guessing among the vocabulary, because then
        the plan is far outside of the laws' range.
      low, high: the lowest and the highest of the laws' losses, moved apart by UNCERTAINTY times the mean on each side,
        `high` at most the loss of guessing; None if `loss` is.
    """

    tokens_per_param: float
    optimal_tokens: float
    optimal_by_law: dict[str, float]
    loss_by_law: dict[str, float]
    loss: float | None
    low: float | None
    high: float | None


def stand(params: float, tokens: float, vocab_size: int) -> Scaling:
    """Returns what the laws predict for training `params` parameters on `tokens` tokens.

    Repeated tokens count as new ones, which is accurate up to about 4 epochs (arXiv:2305.16264).
    """
    losses = {law.name: law.loss(params, tokens) for law in LAWS}
    mean, guessing = sum(losses.values()) / len(losses), math.log(vocab_size)
    known = max(losses.values()) < guessing
    return Scaling(
        tokens_per_param=tokens / params,
        optimal_tokens=TOKENS_PER_PARAM * params,
        optimal_by_law={law.name: law.optimal_tokens(params) for law in LAWS},
        loss_by_law=losses if known else {},
        loss=mean if known else None,
        low=min(losses.values()) - UNCERTAINTY * mean if known else None,
        high=min(max(losses.values()) + UNCERTAINTY * mean, guessing) if known else None,
    )
