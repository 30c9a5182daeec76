"""Where an engine lives and how its callers reach it: in their own trio loop, or in a thread, behind a portal.

Portals lead from asyncio and from threads to the same side of trio, `trio_thread`.

`trio_engine` is the engine; `door` admits its requests, `alternatives` runs several at once. The folder imports
`inputs`, `outputs`, `speech` and `actors`. Only `asyncio_host` and `portal` know asyncio.
"""
