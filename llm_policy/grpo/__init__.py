"""GRPO for language models: the trainer, its objective, its training pass, the warm start, what it logs."""
