"""The networks: Whisper, other encoder-decoders, decoders, encoders, and the heads that pool. Their base class is in
`network`.

A network owns no tensor; it refers to tensors that the executor's resource stack owns. The package imports all folders
of `models` but `blueprints`. It knows no queues or requests, only the chunks of one step."""
