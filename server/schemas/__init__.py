"""The bodies of requests and answers, in the shape of OpenAI's API, by pydantic; `/openapi.json` is made of them.

A member that is not listed is refused, and the error suggests the most similar name. A member that is accepted but
changes nothing says so in its description. The folder imports nothing from the other folders of the server.
"""
