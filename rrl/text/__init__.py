"""Text without models: answer normalisation, answer metrics, tagged spans."""
