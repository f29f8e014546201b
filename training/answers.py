"""Held-out answers word for word: `python -m training.answers MODEL HELD-OUT [--most 400]`.

Each assistant's turn of a file of chats (`training.chats`) is answered greedily from what comes before it. Prints how
many are the file's own, by kind: calls of tools, answers after a call's result, stories, and all other answers.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tiermoe
from benchmarks.rounds import parser_of

_TURN, _END, _TEXT = "<|im_start|>assistant\n", "<|im_end|>", "<|endoftext|>"


def turns(text: str) -> Iterator[tuple[str, str]]:
    """(what comes before a turn, the turn's answer) of each assistant's turn."""
    for chat in text.split(_TEXT):
        at = chat.find(_TURN)
        while at >= 0:
            begins = at + len(_TURN)
            ends = chat.index(_END, begins)
            yield chat[:begins], chat[begins:ends]
            at = chat.find(_TURN, ends)


def kind_of(before: str, answer: str) -> str:
    """What an answer shows."""
    if answer.startswith("<tool_call>"):
        return "calls"
    if before.rpartition("<|im_start|>user\n")[2].startswith("<tool_response>"):
        return "after a result"
    return "stories" if answer.startswith("Once ") else "questions"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path, metavar="HELD-OUT")
    parser.add_argument("--most", type=int, default=400, help="answers that are tried; default 400")
    args = parser.parse_args()
    right, asked = Counter[str](), Counter[str]()
    with tiermoe.load(args.model, bits=16) as (model, tokenizer):
        for before, answer in list(turns(args.held_out.read_text(encoding="utf-8")))[: args.most]:
            inputs = tokenizer(before, return_tensors="pt", add_special_tokens=False)
            most = len(tokenizer(answer).input_ids) + 2
            made = model.generate(**inputs, max_new_tokens=most, do_sample=False)
            text = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
            kind = kind_of(before, answer)
            asked[kind] += 1
            right[kind] += text.partition(_END)[0] == answer
            if text.partition(_END)[0] != answer:
                print(f"{kind}: {answer!r}, answered {text!r}", file=sys.stderr)
    for kind, count in asked.items():
        print(f"{kind}: {right[kind]} of {count}")


if __name__ == "__main__":
    main()
