"""A tiny random llama model on disk, for the benchmark room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

VOCABULARY = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: random float32 llama with grouped KV heads, and a byte-level BPE trained on sentences."""
    import random

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from radixrt.bench.workloads import sentences

    path = tmp_path_factory.mktemp("bench") / "tiny-llama"
    made = sentences(random.Random(0))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([next(made) for _ in range(200)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.2,  # logits far enough apart that rounding does not decide the likeliest token
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
