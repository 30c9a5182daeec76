"""The networks at work behind one protocol (`network`): Whisper, decoders, encoders, and the heads that pool.

A network owns no tensor; it refers to what the executor's resource stack owns. The room imports all rooms but
`blueprints` and `machine`. It knows no queue and no request, only the chunks of one step.
"""
