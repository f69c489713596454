"""Images for a training: decoding, cache, sampling and batches."""
