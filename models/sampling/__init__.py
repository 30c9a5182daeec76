"""The way from logits to tokens: logit rules, structured output, chance, and the search for text that repeats itself.

The folder imports `core` and `native`. Every token depends on its own row, its seed and its position alone, whatever
else is in the step.
"""
