/* Plain C, for any machine: the reference of the others. */
#include "../kernels.h"

static int runs(void) { return 1; }

#include "generic/vector.h"

#include "generic/products.h"
#include "shared/coded_blocks.h"
#include "generic/widen.h"
#include "shared/eight_gguf.h"
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

#define KERNELS kernels_generic
#define NAME "generic"
#define gguf_block strips_block
#include "shared/table.h"
