"""Tool calls in the text that models write: they are found in a text, whole or piece by piece, and forced by a grammar.

Everything here is pure: strings in, values out. `syntax` has the values. `text` is a text that is still being written.
`json_calls` and `xml_calls` are the syntaxes of models, and `templated` follows the checkpoint's own response
template. `reader` divides a text into content and calls. `formats` chooses the syntax of a model. The folder imports
`core` alone.
"""
