"""The OpenAI API over HTTP. Needs the `server` extra: `pip install "dsde[server]"`."""
