"""The HTTP side of a replica: requests in, text and events out. Start at server.py."""
