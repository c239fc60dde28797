"""The engine: public API, worker thread, batch, results and audits."""
