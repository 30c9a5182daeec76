"""`triolet serve`: an HTTP server over `Engines`, in the shape of OpenAI's API, by Starlette and hypercorn on trio.

`serving` listens and ends in order; an `Exchange` is one request and knows how it may end; `app` finds the endpoint.
The rooms: `schemas` has the bodies of requests and answers, `endpoints` what is done for each, `manners` who may ask
and how much. Needs the extra ``server``. May use `triolet.core` and `triolet.api`; knows no asyncio.
"""
