"""The networks that a recipe can train from scratch, and the base models that it can finetune."""
