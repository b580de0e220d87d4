"""Text processing without models: prompts in chat templates, token ids, tagged spans, answer normalisation and answer metrics."""
