"""The native library runs a step of a decoder or an encoder in one call, outside of Python's lock.

`library` loads it. `panels` brings weights into the order in which the library reads them. `program` describes a model
as a list of operations, and `runner` runs such a list. `decoders`, `crossed_decoder` and `encoders` write the lists for
modules of transformers. The source of the library is in the folder `native/` of the repository.

The folder imports `memory`, for the places of a step's rows. The library owns nothing but its threads; all its memory
is tensors of torch.
"""
