/* The table of an instruction set, which its C file makes: every operation of kernels.h, and the product of every quant by
 * name. */
#ifndef TIERMOE_ISA_TABLE_H
#define TIERMOE_ISA_TABLE_H

#include "../kernels.h"
#include "activations.h"
#include "attention.h"
#include "encode.h"
#include "neurons.h"
#include "products.h"
#include "prompt.h"
#include "scan.h"

#define PRODUCT_ENTRY(coding, name, columns, bytes, group, offsets) [coding] = PRODUCT_NAME(name),

/* symbol: of the table; set: its name in TIERMOE_ISA; test: whether this machine has the instructions. */
#define KERNELS_TABLE(symbol, set, test)                                               \
    const Kernels symbol = {                                                           \
        .name = set,                                                                   \
        .runs = test,                                                                  \
        .prepared = token_floats,                                                       \
        .prepare = prepare,                                                            \
        .product = {EACH_QUANT(PRODUCT_ENTRY)},                                        \
        .gate = gate_rows,                                                             \
        .combine = combine,                                                            \
        .add = add,                                                                    \
        .times_sigmoid = times_sigmoid,                                                \
        .norm_scale = norm_factor,                                                     \
        .norm_part = norm_columns,                                                     \
        .layer_norm = layer_norm,                                                      \
        .rotate = rotate_columns,                                                      \
        .logits = logits_of,                                                           \
        .exponentials = exponentials,                                                  \
        .softplus = softplus_of,                                                       \
        .attend_tile = attend,                                                         \
        .attend_rows = attend_rows,                                                    \
        .merge_tiles = merge,                                                          \
        .convolve = convolve,                                                          \
        .delta_unit = delta_unit,                                                      \
        .delta_factors = delta_factors,                                                \
        .delta_rule = delta_rule,                                                      \
        .delta_gate = delta_gate,                                                      \
        .scan_steps = scan_steps,                                                      \
        .scan = scan,                                                                  \
        .scan_norm = scan_norm,                                                        \
        .scan_channels = scan_channels,                                                \
        .hqq = hqq_block,                                                              \
        .encode = encode_block,                                                        \
        .neurons_up = neurons_up,                                                      \
        .neurons_down = neurons_down,                                                  \
    }

#endif
