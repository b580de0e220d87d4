"""Search: indexes over passages and query encoders behind one thread-safe class, `Retriever`."""
