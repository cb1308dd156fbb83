"""KV bookkeeping without tensors: which page holds which token (``PagePool``), and who shares it (``RadixTree``)."""
