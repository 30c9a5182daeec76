"""What users meet: `Engine`, and how what they bring becomes requests and what comes back becomes results.

The rooms are inputs, outputs, speech, hosts and the command line. The folder imports `actors`, `models` and `core`. It
never decides when a request runs, and imports torch only inside functions, so that ``import triolet`` is quick.
"""
