"""Images: read, cached, split between ranks, and fed to a training."""
