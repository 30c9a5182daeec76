"""Hosts: an engine lives in its callers' own trio loop, or in a thread, which they reach through a portal.

Portals lead from asyncio and from threads to the same side of trio, `trio_thread`.

`trio_engine` is the engine; `door` admits its requests, `alternatives` runs several at once. The folder imports
`inputs`, `outputs`, `speech` and `actors`. Only `asyncio_host` knows asyncio.
"""
