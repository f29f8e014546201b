/* NEON, which every 64-bit Arm has. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../kernels.h"

static int runs(void) { return 1; }

#include "neon/vector.h"

#include "generic/widen.h"
#include "shared/nibbles.h"
#include "neon/blocks.h"
#include "shared/coded_blocks.h"
#include "shared/eight_gguf.h"
#include "shared/eight_rows.h"
#include "shared/ahead.h"
#include "shared/codes.h"
#include "shared/exponential.h"
#include "shared/sigmoids.h"
#include "shared/delta.h"
#include "shared/hqq.h"
#include "shared/kv_codes.h"
#include "shared/ladders.h"
#include "shared/neurons.h"
#include "shared/norm.h"
#include "shared/rotary.h"
#include "shared/rows.h"
#include "shared/sums.h"
#include "shared/prepare.h"
#include "shared/units.h"
#include "shared/weigh.h"

#include "shared/prompt_rows.h"
#include "shared/tiles.h"

#define KERNELS kernels_neon
#define NAME "neon"
#define gguf_block strips_block
#include "shared/table.h"
#endif
