"""Attention over paged keys and values: what the layers of transformers call in place of their own.

`paged` serves steps of any shape, `fixed` those of a fixed shape, which graphs can replay, `crossed` the decoders of
encoder-decoders. The folder imports `memory`.
It knows no model by name.
"""
