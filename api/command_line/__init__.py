"""The command ``triolet``: transcribe, generate, embed, devices, and the live view of ``--watch``.

The room imports the rest of `api`, which never imports it. It starts without torch: each command imports what it needs.
"""
