"""Decoder and encoder models in Flax NNX, loaded from and saved to Hugging Face folders."""
