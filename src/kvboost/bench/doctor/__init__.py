"""`kvboost doctor`: a look at one machine with one model, and what to set there."""
