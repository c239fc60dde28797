"""The HTTP server: OpenAI's API in front of one engine."""
