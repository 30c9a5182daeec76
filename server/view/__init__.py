"""The messages to those who watch the server, and the page that shows them.

`messages` turns events and statistics of engines into messages, as values. `watchers` keeps what each watcher has not
read yet. `page` puts the page together from the files in ``page/``. The endpoints are in
`triolet.server.endpoints.page`. May use `triolet.server.problems`, `triolet.core` and `triolet.api`.
"""
