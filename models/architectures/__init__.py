"""The models that are known besides Whisper: what their checkpoints need, and how their prompts are read.

`text` reads decoders and encoders of text; `families` knows the multimodal models, with images in `vision` and audio in
`audio`; `crossed` knows the encoder-decoders, `crossed_checkpoint` reads their checkpoints; `prompts` turns what
callers write into tokens, `items` into encoder items. The package imports `checkpoints` and
`machine`. It runs no step.
"""
