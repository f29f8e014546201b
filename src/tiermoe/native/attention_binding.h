/* The Python face of attention.h, for the table of module.c. */
#ifndef TIERMOE_ATTENTION_BINDING_H
#define TIERMOE_ATTENTION_BINDING_H

#include <Python.h>

PyObject *attention_layer(PyObject *self, PyObject *args);
PyObject *attention_slabs(PyObject *self, PyObject *args);
PyObject *attention_step(PyObject *self, PyObject *args);
PyObject *attention_room(PyObject *self, PyObject *args);
PyObject *attention_attend(PyObject *self, PyObject *args);
PyObject *attention_prompt_room(PyObject *self, PyObject *args);
PyObject *attention_prompt_state(PyObject *self, PyObject *args);
PyObject *attention_attend_prompt(PyObject *self, PyObject *args);

#define ATTENTION_METHODS                                                                                               \
    {"attention", attention_layer, METH_VARARGS,                                                                        \
     "attention(projections, norms, sinks, heads, kv_heads, key_columns, value_columns, rotary_columns, latent_columns," \
     " window, interleaved, scale, residual_multiplier) -> bytes of an Attention"},                                     \
        {"slabs", attention_slabs, METH_VARARGS,                                                                        \
         "slabs(keys, values, key_scales, value_scales, slabs, kv_heads, room, key_columns, value_columns, ring) -> bytes" \
         " of a Slabs"},                                                                                                \
        {"step", attention_step, METH_VARARGS,                                                                          \
         "step(tokens, slabs, positions, first, cos, sin, rotary_columns, chosen, most) -> bytes of a Step"},                          \
        {"workspace", attention_room, METH_VARARGS,                                                                     \
         "workspace(attention, step, slabs, threads) -> bytes that attend needs; ValueError where they do not fit"},     \
        {"attend", attention_attend, METH_VARARGS, "attend(attention, step, slabs, workspace, x, out, normed, threads)"}, \
        {"prompt_workspace", attention_prompt_room, METH_VARARGS,                                                       \
         "prompt_workspace(slabs, threads) -> bytes that attend_prompt needs"},                                         \
        {"prompt_state", attention_prompt_state, METH_VARARGS,                                                          \
         "prompt_state(slabs, tokens, heads) -> bytes of the state of attend_prompt"},                                  \
        {"attend_prompt", attention_attend_prompt, METH_VARARGS,                                                        \
         "attend_prompt(slabs, query, out, sinks, tokens, heads, slab, first, window, scale, begin, end, state,"        \
         " workspace, threads); ValueError where they do not fit"}

#endif
