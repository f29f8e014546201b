"""One answer: prompts to tokens, tokens to text, conversations."""
