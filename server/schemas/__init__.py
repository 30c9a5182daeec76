"""The bodies of requests and answers, in the shape of OpenAI's API, by pydantic; `/openapi.json` is made of them.

A member that is not listed is refused, with the nearest name that is; one that is accepted and changes nothing says so.
May use nothing of the other rooms.
"""
