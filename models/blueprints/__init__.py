"""What is found out once about a checkpoint and its device, and what is built from it: on open, and again on wake.

`read` chooses the blueprint; `whisper`, `crossed` (other encoder-decoders) and `text` are the three there are. `trial`
and `trial_crossed` refuse a model that our attention would compute wrongly. The folder imports every other folder of
`models`. A blueprint holds no tensor.
"""
