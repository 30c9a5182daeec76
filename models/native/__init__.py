"""The native library: a decoder's step in one call, outside of Python's lock (`library`), weights in the order that it
reads them (`panels`), a model as its list of operations (`program`), the same at work (`runner`), and which modules of
transformers are such lists (`decoders`, `crossed`). What it computes is in the folder `native/` of the repository.

The folder imports `memory`, for where a step's rows lie. The library owns its threads alone; all memory is tensors of
torch.
"""
