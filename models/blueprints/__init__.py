"""The facts that are found out once about a checkpoint and its device, and how a model is built from them: on open, and
again on wake.

`read` chooses the blueprint; `whisper`, `crossed` (other encoder-decoders) and `text` are the three there are.
`comparison` refuses a model that our attention would compute wrongly. The folder imports every other folder of
`models`. A blueprint holds no tensor.
"""
