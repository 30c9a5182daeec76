"""Where an engine lives and how its callers reach it: in their own trio loop, or behind a portal from asyncio.

`trio_engine` is the engine; `door` and `alternatives` are how requests enter it. The room imports `inputs`, `outputs`,
`speech` and `actors`. asyncio is known to `asyncio_host` and the two portal files alone.
"""
