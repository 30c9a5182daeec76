"""Who runs when, in which pages, and what each step holds: continuous batching.

`planner` owns the state and commits; `acts` drafts a step; `room` keeps the places, pages and slots; `acquirer` and
`holds` say who acquires encoder outputs; `quarantine` finds who crashes the steps. The room imports the rest of `core`.
An act never changes anything but its draft.
"""
