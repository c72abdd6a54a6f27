"""One file per architecture."""
