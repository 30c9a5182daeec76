"""`triolet serve`: an HTTP server for `Engines`, in the shape of OpenAI's API, with Starlette and hypercorn on trio.

`serving` starts the server and ends it in order. An `Exchange` is one request and its answer, with every way in which
it may end. `app` finds the endpoint of a request. The folders: `schemas` has the bodies of requests and answers,
`endpoints` the work for each request, and `manners` the rules of who may ask, and how much. Needs the extra ``server``.
May use `triolet.core` and `triolet.api`; never uses asyncio.
"""
