"""The HTTP server: OpenAI's API over an engine, with keys, limits and telemetry."""
