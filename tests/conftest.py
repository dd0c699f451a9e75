"""Set before anything imports the libraries that read it."""

import os

from hypothesis import settings

# Nothing may ask a hub over the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# The toys are too small to share between threads, which then only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# No test measures time.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
