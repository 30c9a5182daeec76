"""What whoever watches the server is told, and the page that shows it.

`model_view` and `told` decide, by values: what of an engine's events and statistics is told, in which words. `watchers`
keeps what each watcher has not been told yet. `page` puts the page together from the files of `triolet.server.page`.
The endpoints are in `triolet.server.endpoints.page`. May use `triolet.server.problems`, `triolet.core` and
`triolet.api`.
"""
