"""A byte-level BPE tokenizer trained on the same text as the model: it can encode any string."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
TAGS = [f"<{slash}{name}>" for name in ("tool_call", "tool_response") for slash in ("", "/")]
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SAMPLE_LENGTH, SAMPLE_EVERY = 100_000, 400_000


def samples(documents: Iterable[str]) -> Iterator[str]:
    """A quarter of every document, in characters: merges need a sample of the text, not all of it."""
    for document in documents:
        for begin in range(0, len(document), SAMPLE_EVERY):
            yield document[begin : begin + SAMPLE_LENGTH]


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, max_length: int, chats: bool = False
) -> PreTrainedTokenizerFast:
    """Learn ``vocab_size`` tokens, of which token 0 is `END` and 256 are the bytes.

    ``chats`` adds the tokens of ChatML and of tool calls in Qwen3's form with a chat template, and makes each digit a
    token, as Qwen3's tokenizer does.

    ``max_length`` is the model's context in tokens, which the tokenizer's own configuration records.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if chats else words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS) * chats,
        special_tokens=[END, TURN, TURN_END] if chats else [END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples(documents), trainer)
    if chats:
        tokenizer.add_tokens(TAGS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=TURN_END if chats else END,
        model_max_length=max_length,
        **({"chat_template": CHAT_TEMPLATE.read_text()} if chats else {}),
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `PreTrainedTokenizerFast.save_pretrained` wrote to ``directory``."""
    return PreTrainedTokenizerFast.from_pretrained(directory)
