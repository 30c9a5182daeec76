"""The command ``triolet``: transcribe, generate, embed, devices, and the live view of ``--watch``.

The folder imports the rest of `api`, which never imports it. The command starts without torch: each subcommand imports
what it needs.
"""
