"""Server: a model behind HTTP, requests that join and leave a running batch, the dialects of clients."""
