"""A model: its files, tokenizer, chat template and decoder."""
