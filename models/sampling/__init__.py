"""The way from logits to tokens: logit rules, structured output, chance, and the search for text that repeats itself.

The folder imports `core` alone. Every token depends on its own row, its seed and its position, whatever else is in the
step.
"""
