"""The networks at work (`network` has their base): Whisper, other encoder-decoders, decoders, encoders,
and the heads that pool.

A network owns no tensor; it refers to what the executor's resource stack owns. The folder imports all folders of
`models` but `blueprints` and `machine`. It knows no queue and no request, only the chunks of one step."""
