"""Images for training: decoding, the cache of decoded images, sampling and batches."""
