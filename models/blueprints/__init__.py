"""The facts that are found once about a checkpoint and its device, and the building of a model from them, on open and
on wake.

`read` chooses one of the three blueprints: `whisper`, `crossed` (other encoder-decoders) or `text`. `comparison`
refuses a model that our attention would compute wrongly. The package imports every other folder of `models`. A
blueprint holds no tensor.
"""
