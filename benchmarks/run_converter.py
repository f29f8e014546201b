"""llama.cpp's own converter in a process of its own, for checkpoints with a tokenizer that it does not know.

    python -m benchmarks.run_converter FOLDER MODEL --outtype bf16 --outfile FILE.gguf

FOLDER has `convert_hf_to_gguf.py`. The converter knows pre-tokenizers by a hash of what they make of a text, and
refuses the others, as that of `models/stories-7m`: these are named "gpt-2". It also expects GLM's own tokens of a GLM
checkpoint. A benchmark feeds token ids, which no tokenizer reads.
"""

import sys
from typing import Any


def main() -> None:
    sys.path.insert(0, sys.argv.pop(1))
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    known = TextModel.get_vocab_base_pre

    def pre_tokenizer(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = pre_tokenizer
    glm = TextModel._set_vocab_glm

    def glm_vocabulary(self: Any) -> None:
        own = "[gMASK]" in (self.dir_model / "tokenizer.json").read_text(encoding="utf-8")
        glm(self) if own else self._set_vocab_gpt2()

    TextModel._set_vocab_glm = glm_vocabulary
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
