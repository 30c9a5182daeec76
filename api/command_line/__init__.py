"""The command ``triolet`` with its subcommands, and the file of ``--trace``.

The folder imports the rest of `api`, which never imports it. The command starts without torch: each subcommand imports
what it needs.
"""
