"""Continuous batching: which sequence runs when, in which pages, and what each step feeds.

`planner` owns the state and commits steps. `acts` drafts a step. `room` keeps the books of places, pages and slots.
`acquirer` decides which sequence acquires encoder outputs, and keeps their books. `quarantine` finds the request that
crashes steps. The folder imports the rest of `core`. An act changes nothing but its draft.
"""
