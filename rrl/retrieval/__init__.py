"""Search: passages, encoders and indexes behind one thread-safe `Retriever`."""
