"""Attention over paged keys and values, which the layers of transformers call in place of their own attention.

`paged` serves steps of any shape, `fixed` serves steps of a fixed shape, which `graphs` records and replays, and
`crossed` serves the decoders of encoder-decoders. The package imports `memory`. It knows no model by name.
"""
