"""The facts that are found once about a checkpoint and its device, and how a model is built from these facts on open,
and again on wake.

`read` chooses one of the three blueprints: `whisper`, `crossed` (other encoder-decoders) or `text`. `comparison`
refuses a model that our attention would compute wrongly. The package imports every other folder of `models`. A
blueprint holds no tensor.
"""
