"""Between text and tokens: prompts and inputs, detokenisation, chat and tool parsing, answers of heads."""
