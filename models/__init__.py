"""The part that the device computes: an executor of torch, and all that it is assembled from.

`executor` runs steps and encode batches; `sampler` takes tokens from logits; `speculation` proposes draft tokens. The
folders hold the rest, from the files of a checkpoint to the networks. The folder imports `core`, torch and
transformers. It knows no trio, and starts no thread that outlives a call: its owner calls it from one."""
