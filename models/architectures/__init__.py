"""The models that are known besides Whisper: what a checkpoint of each needs, and how its prompts are read.

`text` reads decoders and encoders of text; `families` knows the multimodal ones, `vision` those of images and `audio`
those of audio; `crossed` knows the encoder-decoders, `crossed_checkpoint` reads them; `prompts` turns what callers
write into tokens, `items` into encoder items. The folder imports `checkpoints`. It runs no step.
"""
