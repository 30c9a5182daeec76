"""The part of the engine that computes on the device: an executor for torch, and everything that the executor is built
from.

`executor` runs steps and encode batches; `sampler` takes tokens from logits; `speculation` proposes draft tokens. The
folders hold the rest, from the files of a checkpoint to the networks. The package imports `core`, torch and
transformers. It does not use trio, and starts no thread that outlives a call. The executor's owner calls the executor
from a single thread."""
