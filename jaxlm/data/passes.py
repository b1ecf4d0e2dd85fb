"""Computes how many times a run goes through each source of its data."""

from jaxlm.data.rows import Order, normalise_mixture

# Times through a source beyond which a token teaches less than a new one (Muennighoff et al. 2023, arXiv:2305.16264).
MOST = 4


def passes(order: Order, steps: int) -> dict[str, float]:
    """Returns source -> how many times a run of `steps` steps goes through it. Raises ConfigError if the mixture is wrong."""
    tokens, trained = order.data.token_counts(), steps * order.batch_size * order.seq_len
    shares = normalise_mixture(order.mixture, list(tokens))
    return {name: trained * float(share) / tokens[name] for name, share in shares.items() if tokens[name]}
