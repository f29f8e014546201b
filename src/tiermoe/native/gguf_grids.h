/* The grids of the types IQ1, IQ2 and IQ3 of GGUF files: a code is the place of eight columns, in IQ3 of four, the first in the
 * lowest byte. Of IQ1 signed bytes, eight times GGML's; of the others sizes, whose signs lie in the blocks. */
#ifndef TIERMOE_GGUF_GRIDS_H
#define TIERMOE_GGUF_GRIDS_H

#include <stdint.h>

extern const uint64_t IQ1_GRID[2048], IQ2_XXS_GRID[256], IQ2_XS_GRID[512], IQ2_S_GRID[1024];
extern const uint32_t IQ3_XXS_GRID[256], IQ3_S_GRID[512];

/* Those of IQ2 and IQ3 as numbers of sizes, from the least: 2 bits to a column, in IQ3 a nibble; made when the program is
 * loaded. */
extern uint16_t IQ2_XXS_WORDS[256], IQ2_XS_WORDS[512], IQ2_S_WORDS[1024], IQ3_XXS_WORDS[256], IQ3_S_WORDS[512];

#endif
