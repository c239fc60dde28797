"""The HTTP server: OpenAI's API over an engine, and what an operator watches it with."""
