"""Transcripts as texts: plain text, subtitles (SRT, WebVTT), tab-separated values and JSON.

Everything here is pure: strings in, strings out. `settings` are the caller's wishes, `cues` cuts words and segments
into subtitles, `objects` makes what JSON holds, and `writers` has a writer for each format, fed segment by segment. The
command writes their output to files; a server can send it. The folder imports `outputs` alone.
"""
