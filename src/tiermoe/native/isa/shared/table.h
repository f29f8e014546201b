/* The table of an instruction set: KERNELS is its symbol, NAME its name. */
const Kernels KERNELS = {
    .name = NAME,
    .runs = runs,
    .group_sums = group_sums,
    .block = {[INT4] = int4_block, [INT8] = rows_block, [BF16] = rows_block, [INT6] = int6_block, [INT2] = int2_block,
              [FIRST_GGUF ... LAST_GGUF] = gguf_block, [FIRST_PUBLISHED ... LAST_PUBLISHED] = gguf_block},
    .gate = gate_rows,
    .combine = combine,
    .add = add,
    .norm_scale = norm_factor,
    .norm_part = norm_columns,
    .layer_norm = layer_norm,
    .rotate = rotate_columns,
    .logits = logits_of,
    .attend_tile = attend,
    .merge_tiles = merge,
    .widen = widen_codes,
};
