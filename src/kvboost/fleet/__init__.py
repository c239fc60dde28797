"""Several engines behind one address: a Ray Serve application."""
