"""Set before anything imports a library that would otherwise ask a hub over the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
