#define PY_SSIZE_T_CLEAN
#include "attention_binding.h"

#include "attention.h"
#include "prompt_attention.h"

typedef unsigned long long Address;

static void *at(Address address) { return (void *)(uintptr_t)address; }

/* Reads a struct that Python keeps as its bytes; ValueError for another size. */
static int take(PyObject *bytes, void *into, size_t size) {
    if (!PyBytes_Check(bytes) || (size_t)PyBytes_GET_SIZE(bytes) != size) {
        PyErr_Format(PyExc_ValueError, "expected %zu bytes of a packed struct", size);
        return 0;
    }
    memcpy(into, PyBytes_AS_STRING(bytes), size);
    return 1;
}

static PyObject *give(const void *from, size_t size) { return PyBytes_FromStringAndSize(from, (Py_ssize_t)size); }

/* (bytes of a matrix, address of a bias), or None. */
static int take_projection(PyObject *from, Projection *into) {
    PyObject *matrix;
    Address bias;
    *into = (Projection){0};
    if (from == Py_None) return 1;
    if (!PyArg_ParseTuple(from, "OK", &matrix, &bias) || !take(matrix, &into->matrix, sizeof into->matrix)) return 0;
    into->bias = at(bias);
    return 1;
}

/* (weight, bias, width, epsilon, kind), or None. */
static int take_norm(PyObject *from, Norm *into) {
    Address weight, bias;
    Py_ssize_t width;
    float epsilon;
    int kind;
    *into = (Norm){0};
    if (from == Py_None) return 1;
    if (!PyArg_ParseTuple(from, "KKnfi", &weight, &bias, &width, &epsilon, &kind)) return 0;
    *into = (Norm){at(weight), at(bias), (size_t)width, epsilon, (NormKind)kind};
    return 1;
}

PyObject *attention_layer(PyObject *self, PyObject *args) {
    PyObject *projections[6], *norms[4];
    Address sinks;
    Py_ssize_t heads, kv_heads, key, value, rotary, latent, window;
    Attention layer = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "(OOOOOO)(OOOO)Knnnnnnnppff", &projections[0], &projections[1], &projections[2],
                          &projections[3], &projections[4], &projections[5], &norms[0], &norms[1], &norms[2], &norms[3],
                          &sinks, &heads, &kv_heads, &key, &value, &rotary, &latent, &window, &layer.gated, &layer.interleaved,
                          &layer.scale, &layer.residual_multiplier))
        return NULL;
    Projection *to[] = {&layer.query, &layer.key, &layer.value, &layer.output, &layer.query_first, &layer.key_up};
    for (int i = 0; i < 6; i++)
        if (!take_projection(projections[i], to[i])) return NULL;
    Norm *norm_to[] = {&layer.before, &layer.after, &layer.query_norm, &layer.key_norm};
    for (int i = 0; i < 4; i++)
        if (!take_norm(norms[i], norm_to[i])) return NULL;
    layer.sinks = at(sinks), layer.window = (size_t)window;
    layer.heads = (size_t)heads, layer.kv_heads = (size_t)kv_heads;
    layer.key_columns = (size_t)key, layer.value_columns = (size_t)value;
    layer.rotary_columns = (size_t)rotary, layer.latent_columns = (size_t)latent;
    return give(&layer, sizeof layer);
}

PyObject *attention_slabs(PyObject *self, PyObject *args) {
    Address keys, values, key_scales, value_scales;
    Py_ssize_t count, kv_heads, room, key, value;
    int ring;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKnnnnnp", &keys, &values, &key_scales, &value_scales, &count, &kv_heads, &room, &key,
                          &value, &ring))
        return NULL;
    const Slabs slabs = {at(keys), at(values), at(key_scales), at(value_scales), (size_t)count, (size_t)kv_heads,
                         (size_t)room, (size_t)key, (size_t)value, ring};
    return give(&slabs, sizeof slabs);
}

PyObject *attention_step(PyObject *self, PyObject *args) {
    Address slabs, positions, first, cos, sin, chosen;
    Py_ssize_t tokens, rotary, most;
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKKKKnKn", &tokens, &slabs, &positions, &first, &cos, &sin, &rotary, &chosen, &most))
        return NULL;
    Step step = {(size_t)tokens, at(slabs), at(positions), at(first), at(cos), at(sin), (size_t)rotary, 0, at(chosen), (size_t)most};
    step_measure(&step);
    return give(&step, sizeof step);
}

PyObject *attention_room(PyObject *self, PyObject *args) {
    PyObject *bytes[3];
    unsigned threads;
    Attention layer;
    Step step;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOI", &bytes[0], &bytes[1], &bytes[2], &threads)) return NULL;
    if (!take(bytes[0], &layer, sizeof layer) || !take(bytes[1], &step, sizeof step) || !take(bytes[2], &slabs, sizeof slabs))
        return NULL;
    const char *misfit = attention_misfit(&layer, &step, &slabs);
    if (misfit) return PyErr_SetString(PyExc_ValueError, misfit), NULL;
    return PyLong_FromSize_t(attention_workspace(&layer, &step, threads));
}

PyObject *attention_attend(PyObject *self, PyObject *args) {
    PyObject *bytes[3];
    Address workspace, x, out, normed;
    unsigned threads;
    Attention layer;
    Step step;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOKKKKI", &bytes[0], &bytes[1], &bytes[2], &workspace, &x, &out, &normed, &threads))
        return NULL;
    if (!take(bytes[0], &layer, sizeof layer) || !take(bytes[1], &step, sizeof step) || !take(bytes[2], &slabs, sizeof slabs))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    attention_run(&layer, &step, &slabs, at(x), at(out), at(normed), at(workspace), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *attention_prompt_room(PyObject *self, PyObject *args) {
    PyObject *bytes;
    unsigned threads;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "OI", &bytes, &threads) || !take(bytes, &slabs, sizeof slabs)) return NULL;
    return PyLong_FromSize_t(prompt_workspace(&slabs, threads));
}

PyObject *attention_prompt_state(PyObject *self, PyObject *args) {
    PyObject *bytes;
    Py_ssize_t tokens, heads;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "Onn", &bytes, &tokens, &heads) || !take(bytes, &slabs, sizeof slabs)) return NULL;
    return PyLong_FromSize_t(sizeof(float) * prompt_state((size_t)tokens, (size_t)heads, &slabs));
}

PyObject *attention_attend_prompt(PyObject *self, PyObject *args) {
    PyObject *bytes;
    Address query, out, sinks, state, workspace;
    Py_ssize_t tokens, heads, slab, first, window, from, to;
    float scale;
    unsigned threads;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKKKnnnnnfnnKKI", &bytes, &query, &out, &sinks, &tokens, &heads, &slab, &first, &window,
                          &scale, &from, &to, &state, &workspace, &threads))
        return NULL;
    if (!take(bytes, &slabs, sizeof slabs)) return NULL;
    const Prompt prompt = {at(query), at(out), at(sinks), (size_t)tokens, (size_t)heads, (size_t)slab, (size_t)first,
                           (size_t)window, scale, (size_t)from, (size_t)to, at(state)};
    const char *misfit = prompt_misfit(&prompt, &slabs);
    if (misfit) return PyErr_SetString(PyExc_ValueError, misfit), NULL;
    Py_BEGIN_ALLOW_THREADS
    prompt_attend(&prompt, &slabs, at(workspace), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
