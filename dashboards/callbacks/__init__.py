"""One module a tab: what the browser asks, what the server answers."""
