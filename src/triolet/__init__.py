"""Triolet: an async inference engine that lives inside your program. ``async with Engine(...)``; see `Engine`."""
