"""Everything that comes out of a checkpoint: configuration, network, tokenizer, chat template, weights."""
