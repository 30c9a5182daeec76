"""Where an engine lives and how its callers reach it: in their own trio loop, or behind a portal from asyncio.

`trio_engine` is the engine; `door` admits its requests, `alternatives` runs several at once. The folder imports
`inputs`, `outputs`, `speech` and `actors`. Only `asyncio_host` and the two portal files know asyncio.
"""
