"""How ranks meet in the process group's store, with signs of life, and what their failures are."""
