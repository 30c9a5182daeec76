"""Tool calls in what models write: found in a text, whole or piece by piece, and forced by a grammar.

Everything here is pure: strings in, values out. `calls` has the values, `scanner` reads syntax from a text that is
still being written, `json_calls` is a syntax of models, `reader` divides a text into content and calls, and `formats`
chooses. The folder imports `core` alone.
"""
