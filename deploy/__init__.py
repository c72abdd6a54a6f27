"""Ways to run Lockstep: the demo of `make serve`, and the demo model in models/tiny-moe."""
