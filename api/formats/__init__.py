"""Transcripts as texts: plain text, subtitles (SRT, WebVTT), tab-separated values and JSON.

Everything here is pure: strings in, strings out. `settings` has the caller's settings, `cues` cuts words and segments
into subtitles, `objects` makes the members of JSON objects, and `writers` has a writer for each format, fed segment by
segment. The command writes their output to files; a server can send it. The folder imports `outputs` alone.
"""
