"""Writes src/tiermoe/native/gguf_grids.c: the grids of the types IQ1, IQ2 and IQ3 of GGUF files, from the tables of the
gguf package.

    python tools/gguf_grids.py > src/tiermoe/native/gguf_grids.c
"""

from __future__ import annotations

from gguf import quants

GRIDS = {  # name → the package's class, what its numbers are multiplied by, entries to a line
    "IQ1_GRID": (quants.IQ1_S, 8, 6),
    "IQ2_XXS_GRID": (quants.IQ2_XXS, 1, 6),
    "IQ2_XS_GRID": (quants.IQ2_XS, 1, 6),
    "IQ2_S_GRID": (quants.IQ2_S, 1, 6),
    "IQ3_XXS_GRID": (quants.IQ3_XXS, 1, 10),
    "IQ3_S_GRID": (quants.IQ3_S, 1, 10),
}

HEAD = """\
/* The grids of gguf_grids.h. Written by tools/gguf_grids.py from the tables of the gguf package, those of GGML
 * (ggml-common.h, MIT licence): change that, not this. */
#include "gguf_grids.h"
"""

WORDS = """
uint16_t IQ2_XXS_WORDS[256], IQ2_XS_WORDS[512], IQ2_S_WORDS[1024], IQ3_XXS_WORDS[256], IQ3_S_WORDS[512];

/* The word of a place of so many columns, whose sizes are their numbers once they are shifted. */
static uint16_t word_of(uint64_t columns, int count, int shift) {
    uint16_t word = 0;
    for (int c = 0; c < count; c++) word |= (uint16_t)((columns >> 8 * c & 0xFF) >> shift << c * (16 / count));
    return word;
}

static __attribute__((constructor)) void make_words(void) {
    for (int i = 0; i < 256; i++) IQ2_XXS_WORDS[i] = word_of(IQ2_XXS_GRID[i], 8, 4); /* 8, 25, 43 */
    for (int i = 0; i < 512; i++) IQ2_XS_WORDS[i] = word_of(IQ2_XS_GRID[i], 8, 4);
    for (int i = 0; i < 1024; i++) IQ2_S_WORDS[i] = word_of(IQ2_S_GRID[i], 8, 4);
    for (int i = 0; i < 256; i++) IQ3_XXS_WORDS[i] = word_of(IQ3_XXS_GRID[i], 4, 3); /* 4, 12, .. 52, 62 */
    for (int i = 0; i < 512; i++) IQ3_S_WORDS[i] = word_of(IQ3_S_GRID[i], 4, 1);     /* 1, 3, .. 15 */
}
"""


def table(name: str) -> str:
    """The definition of a grid: of each place the columns as bytes of one number, the first in the lowest."""
    kind, times, across = GRIDS[name]
    kind.init_grid()
    assert kind.grid is not None
    places = (kind.grid.reshape(kind.grid_shape) * times).astype("int8").view("uint8").tolist()
    width = kind.grid_shape[1]
    entries = [f"0x{int.from_bytes(place, 'little'):0{2 * width}x}" for place in map(bytes, places)]
    lines = [
        "    " + " ".join(f"{each}," for each in entries[at : at + across]) for at in range(0, len(entries), across)
    ]
    return f"\nconst uint{8 * width}_t {name}[{len(entries)}] = {{\n" + "\n".join(lines) + "\n};\n"


def written() -> str:
    """The file."""
    return HEAD + "".join(map(table, GRIDS)) + WORDS


if __name__ == "__main__":
    print(written(), end="")
