"""An answer of `tiermoe serve` by OpenAI's client, token by token.

tiermoe serve stories-7m &
python examples/client.py "Once upon a time"
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="what the server says when it answers")
    parser.add_argument("--max-tokens", type=int, default=60)
    args = parser.parse_args()
    # the client wants a key, a server without one takes any
    client = OpenAI(base_url=args.url, api_key=os.environ.get("TIERMOE_API_KEY", "none"))
    model = client.models.list().data[0].id
    asked = {"model": model, "prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0}
    for event in client.completions.create(**asked, stream=True):
        print(event.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
