"""The HTTP front door: takes OpenAI-API requests and spreads them over the replicas that joined it."""
