"""Reading a log back as a `Run`."""
