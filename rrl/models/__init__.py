"""The decoder and the encoder, in Flax NNX, read from and written to Hugging Face folders."""
