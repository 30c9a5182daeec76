"""Hosts: an engine runs in its callers' own trio loop, or in a thread that its callers reach through a portal.

The portals of asyncio and of threads share their trio side, `trio_thread`.

`trio_engine` is the engine, `door` admits its requests, and `alternatives` runs several requests together. The folder
imports `inputs`, `outputs`, `speech` and `actors`. Only `asyncio_host` knows asyncio.
"""
