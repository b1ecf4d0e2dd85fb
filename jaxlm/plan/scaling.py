"""What scaling laws published by others say of a plan: how many tokens, and about which loss at the end.

Both laws are L(N, D) = E + A / N^alpha + B / D^beta, in nats per token OF THEIR OWN TOKENIZER AND TEXT (MassiveText, 32,000
ids of SentencePiece): with another tokenizer or other data the loss is another number, so compare plans with one another by it,
not with a loss that you see. N counts parameters, D tokens.
"""

import dataclasses

# Spread that is added to that of the two laws: their residuals are near 1%, other data and tokenizers move losses by much more.
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
        """Nats per token."""
        return self.e + self.a / params**self.alpha + self.b / tokens**self.beta

    def optimal_tokens(self, params: float) -> float:
        """D at which a budget of 6ND is spent best on a model of `params`: N's and D's marginal gains are equal."""
        return (self.beta * self.b / (self.alpha * self.a) * params**self.alpha) ** (1 / self.beta)


LAWS = (
    Law("Hoffmann et al. 2022, approach 3 (arXiv:2203.15556)", 1.69, 406.4, 410.7, 0.34, 0.28),
    Law("Besiroglu et al. 2024, re-fit (arXiv:2404.10102)", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
)
TOKENS_PER_PARAM = 20.0  # the rule of thumb that Hoffmann et al.'s approaches 1 and 2 come to


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Where a plan stands.

    Attributes:
      tokens_per_param: of the plan.
      optimal_tokens: by the rule of 20 tokens a parameter.
      optimal_by_law: law's name -> its tokens for this size.
      loss_by_law: law's name -> predicted final loss, nats per token.
      loss: their mean; `low` and `high` the span of the laws, widened by UNCERTAINTY of the mean on both sides.
    """

    tokens_per_param: float
    optimal_tokens: float
    optimal_by_law: dict[str, float]
    loss_by_law: dict[str, float]
    loss: float
    low: float
    high: float


def stand(params: float, tokens: float) -> Scaling:
    """The plan of `params` parameters on `tokens` tokens (repeated tokens count as new ones: true to about 4 epochs,
    arXiv:2305.16264)."""
    losses = {law.name: law.loss(params, tokens) for law in LAWS}
    mean = sum(losses.values()) / len(losses)
    return Scaling(
        tokens_per_param=tokens / params,
        optimal_tokens=TOKENS_PER_PARAM * params,
        optimal_by_law={law.name: law.optimal_tokens(params) for law in LAWS},
        loss_by_law=losses,
        loss=mean,
        low=min(losses.values()) - UNCERTAINTY * mean,
        high=max(losses.values()) + UNCERTAINTY * mean,
    )
