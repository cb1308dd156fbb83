"""From logits to tokens: bias, penalties, filters, seeded draws, log-probabilities, stop strings. Vectorized over the batch."""
