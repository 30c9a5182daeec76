"""Tool calls in what models write: found in a text, whole or piece by piece, and forced by a grammar.

Everything here is pure: strings in, values out. `calls` has the values, `scanner` reads a text that is still being
written, `json_calls`, `named_calls` and `xml_calls` are the syntaxes of models, and `templated` asks the checkpoint's
own response template. `reader` divides a text into content and calls, and `formats` chooses. The folder imports `core`
alone.
"""
